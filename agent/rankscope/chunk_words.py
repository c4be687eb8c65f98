"""Text that writer and reader of a chunk share, so that it costs nothing on the wire.

Part of format version 2 of `rankscope.chunk`: not a byte of it may change, or chunks that are
stored become unreadable. A name that is not in here is only less small; a better text is a new
format version. What is most likely stands last, where zstd reaches it most cheaply.
"""

from __future__ import annotations

DICTIONARY: bytes = (
    b"time_ns gpu utilization_ratio memory_used_bytes memory_total_bytes sm_clock_mhz power_watts "
    b"temperature_celsius throttle_reasons ecc_uncorrected "
    b"time_ns cpu_ratio steal_ratio iowait_ratio load_1m runnable memory_used_bytes "
    b"memory_total_bytes swap_used_bytes disk_free_bytes net_sent_bytes net_received_bytes "
    b"major_faults "
    b".py:forward backward loss.backward optimizer.step train main broadcast reduce barrier send "
    b"recv all_to_all all_to_all_single gather scatter all_gather reduce_scatter "
    b"all_gather_into_tensor reduce_scatter_tensor all_reduce bool uint8 int32 int64 float64 "
    b"float16 bfloat16 float32 max min avg sum class patch probe official hook kernel flight "
    b"recorder error wait future "
    b"step started_ns duration_ns data_ns forward_ns backward_ns optimizer_ns checkpoint_ns "
    b"evaluation_ns other_ns forward_blocked_ns backward_blocked_ns optimizer_blocked_ns "
    b"other_blocked_ns cpu_ns process_cpu_ns gc_ns copy_ns microbatches num_collectives flags "
    b"minor_faults major_faults voluntary_switches involuntary_switches "
    b"arrived_ns duration_ns started_ns returned_ns blocked_ns sequence step size_bytes "
    b"input_bytes output_bytes peer_rank num_tensors state flags group operation dtype reduce_op "
    b"call_site issued_by ended_by"
)
