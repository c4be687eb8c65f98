"""What a machine's samples hold: the columns of every kind of sample chunk, defined once.

`schema.py` takes these into the wire schema. Every row begins with when it was taken and
how often its source is asked, so that a reader can distinguish a lost sample from a rare one.

A name says how to read it:
- `*_total` counts up and never down while its counter lives; a reader takes differences. Samples
  that are lost cost resolution, not truth. A difference below zero is a counter that began anew.
- `*_us` are microseconds, `*_bytes` bytes, `*_ratio` 0 to 1, `*_mhz`, `*_mbps`, `*_gbps`,
  `*_watts`, `*_celsius`, `*_mj` millijoules. Without a unit: a count, or 0 and 1 for no and yes.
- -1 (an empty string for words): this machine does not report it. Nothing missing is ever a zero.
"""

from __future__ import annotations

EVERY_SAMPLE: tuple[str, ...] = (
    "time_ns",  # wall clock
    "interval_ns",  # how often this source is asked now
)

# kind -> what distinguishes its rows, beside the host
SAMPLE_KEYS: dict[str, tuple[str, ...]] = {
    "host": (),
    "pressure": (),
    "tcp": (),
    "disk": ("device",),
    "nic": ("interface",),
    "cgroup": ("cgroup",),
    "process": ("rank", "pid"),
    "connections": ("rank", "local", "remote"),
    "infiniband": ("port",),
    "gpu": ("gpu",),
    "gpu_activity": ("gpu",),
    "gpu_health": ("gpu",),
    "nvlink": ("gpu", "link"),
    "gpu_process": ("gpu", "pid"),
}

_VALUES: dict[str, tuple[str, ...]] = {
    "host": (
        # time of all processors divided by their number: a rate of 1 s/s is the whole machine
        "cpu_user_us_total",
        "cpu_system_us_total",
        "cpu_iowait_us_total",
        "cpu_steal_us_total",
        "cpu_idle_us_total",
        "cpu_busiest_ratio",  # the busiest processor since the row before
        "num_cpus",
        "load_1m",
        "runnable",
        "blocked",  # processes that wait for a disk
        "context_switches_total",
        "memory_total_bytes",
        "memory_available_bytes",
        "memory_used_bytes",  # total minus available
        "memory_cached_bytes",
        "memory_dirty_bytes",  # written, not yet on disk
        "swap_total_bytes",
        "swap_used_bytes",
        "swap_in_bytes_total",
        "swap_out_bytes_total",
        "page_faults_total",
        "major_faults_total",
        "oom_kills_total",
        "run_disk_free_bytes",  # where the run directory is
    ),
    # time in which some or all tasks waited (pressure stall information)
    "pressure": (
        "cpu_some_us_total",
        "memory_some_us_total",
        "memory_full_us_total",
        "io_some_us_total",
        "io_full_us_total",
    ),
    # of the collector's network namespace
    "tcp": (
        "sent_segments_total",
        "received_segments_total",
        "retransmitted_segments_total",
        "timeouts_total",
        "lost_retransmits_total",
        "received_errors_total",
        "sent_resets_total",
        "listen_drops_total",
        "backlog_drops_total",
        "connections",
    ),
    "disk": (
        "read_bytes_total",
        "written_bytes_total",
        "reads_total",
        "writes_total",
        "read_us_total",
        "write_us_total",
        "busy_us_total",
        "in_flight",
    ),
    "nic": (
        "received_bytes_total",
        "sent_bytes_total",
        "received_packets_total",
        "sent_packets_total",
        "received_errors_total",
        "sent_errors_total",
        "received_drops_total",
        "sent_drops_total",
        "is_up",
        "link_mbps",
        "link_changes_total",
    ),
    # of the group, or of its nearest parent that has a limit
    "cgroup": (
        "memory_bytes",
        "memory_limit_bytes",  # the machine's memory where there is no lower limit
        "memory_limit_hits_total",
        "oom_kills_total",
        "cpu_us_total",
        "cpu_limit_cores",  # the machine's processors where there is no lower limit
        "periods_total",
        "throttled_periods_total",
        "throttled_us_total",
        "tasks",
    ),
    "process": (
        "user_us_total",
        "system_us_total",
        "rss_bytes",
        "swap_bytes",
        "num_threads",
        "open_files",
        "voluntary_switches_total",  # of the main thread, as the next two
        "involuntary_switches_total",
        "run_delay_us_total",  # ready to run, no processor free
        # 0: it may run; 1: a signal, 2: a debugger, 3: a frozen control group; MACHINE_PAUSED
        "stopped_by",
        "cpus_allowed",  # processors that the training thread may use, by affinity and cpuset
        # of the nearest control group with a limit on processor time; 0 millicores: none has one
        "throttled_us_total",  # not let run as the time of the period was used up
        "cpu_limit_millicores",
        "minor_faults_total",
        "major_faults_total",
        "read_bytes_total",  # from disks
        "written_bytes_total",
    ),
    # one end of a TCP connection of a rank; the other end has a row of its own
    "connections": (
        "acknowledged_bytes_total",  # sent, and known to have arrived
        "busy_us_total",  # with data to send or to be acknowledged
        "receiver_limited_us_total",  # of that: the receiver took no more
        "sent_segments_total",  # with data; what is sent again counts again
        "retransmitted_segments_total",
        "needless_segments_total",  # sent again although they had arrived, as the other end says
        "dropped_segments_total",  # came, and were thrown away at this socket
        "unsent_bytes",  # wait at the sender
        "in_flight_segments",  # sent, not yet acknowledged
        "window_segments",  # so many may be in flight; -1 where the sender paces itself
        "backoff",  # how often in a row an answer was waited for twice as long
    ),
    "infiniband": (
        "is_active",
        "is_link_up",
        "rate_gbps",
        "sent_bytes_total",
        "received_bytes_total",
        "sent_packets_total",
        "received_packets_total",
        "sent_wait_total",  # ticks in which data waited for credits
        "sent_discards_total",
        "received_errors_total",
        "received_remote_errors_total",
        "symbol_errors_total",
        "integrity_errors_total",
        "buffer_overruns_total",
        "link_recoveries_total",
        "link_downs_total",
        "out_of_sequence_total",
        "sequence_errors_total",
        "ack_timeouts_total",
        "rnr_retries_total",
        "adaptive_retransmits_total",
        "cnp_sent_total",
        "cnp_handled_total",
        "ecn_marked_total",
    ),
    "gpu": (
        "utilization_ratio",
        "memory_utilization_ratio",
        "memory_used_bytes",
        "memory_total_bytes",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "power_watts",
        "energy_mj_total",
        "temperature_celsius",
        "memory_temperature_celsius",
        "throttle_reasons",  # bits, see rankscope.wire.nvidia_codes
        "performance_state",
        "pcie_sent_bytes_total",
        "pcie_received_bytes_total",
    ),
    # GPU performance monitoring, Hopper and newer; means since the row before
    "gpu_activity": (
        "sm_ratio",
        "sm_occupancy_ratio",
        "tensor_ratio",
        "memory_bandwidth_ratio",
        "fp64_ratio",
        "fp32_ratio",
        "fp16_ratio",
        "pcie_sent_bytes_per_second",
        "pcie_received_bytes_per_second",
        "nvlink_sent_bytes_per_second",
        "nvlink_received_bytes_per_second",
    ),
    # what changes rarely; counts since the driver was loaded, `lifetime` since the GPU was made
    "gpu_health": (
        "sm_clock_max_mhz",
        "memory_clock_max_mhz",
        "power_limit_watts",
        "ecc_corrected",
        "ecc_uncorrected",
        "ecc_lifetime_corrected",
        "ecc_lifetime_uncorrected",
        "remapped_corrected",
        "remapped_uncorrected",
        "remap_pending",
        "remap_failed",
        "retired_single_bit",
        "retired_double_bit",
        "retire_pending",
        "pcie_replays_total",
        "pcie_generation",
        "pcie_generation_max",
        "pcie_width",
        "pcie_width_max",
    ),
    "nvlink": (
        "is_up",
        "speed_bytes_per_second",
        "sent_bytes_total",
        "received_bytes_total",
        "crc_errors_total",
        "replay_errors_total",
        "recovery_errors_total",
    ),
    "gpu_process": (
        "rank",  # -1: no rank of this run, or a pid of another namespace
        "memory_bytes",
    ),
}

# `stopped_by`: since the sample before all of the machine or container did not run, the collector
# neither
MACHINE_PAUSED = 4

SAMPLE_COLUMNS: dict[str, tuple[str, ...]] = {
    kind: (*EVERY_SAMPLE, *SAMPLE_KEYS[kind], *values) for kind, values in _VALUES.items()
}
SAMPLE_KINDS = frozenset(SAMPLE_COLUMNS)
# Older agents do not send these: in what they sent they are not known.
LATER_COLUMNS = frozenset({"stopped_by", "cpus_allowed"})
SAMPLE_STRING_COLUMNS = frozenset({
    "device", "interface", "cgroup", "port", "local", "remote",
})  # fmt: skip
SAMPLE_FLOAT_COLUMNS = frozenset(
    {name for names in SAMPLE_COLUMNS.values() for name in names if name.endswith("_ratio")}
    | {"load_1m", "cpu_limit_cores", "rate_gbps", "power_watts", "power_limit_watts"}
)


def is_counter(column: str) -> bool:
    """Return whether a column counts up, so that a reader takes its differences."""
    return column.endswith("_total")
