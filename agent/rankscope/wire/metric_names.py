"""The numbers of training that the agent records by itself: name, unit, meaning, source.

They travel as `Metrics` records. A script that gives a number of the same name through
`rankscope.log_metrics` replaces ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.wire.schema import PHASES


@dataclass(frozen=True)
class Metric:
    """One row of the table. An empty unit means a plain number."""

    name: str
    unit: str
    meaning: str
    source: str


ALTERNATING = "alternating_losses"
PRINTED_LOSS = "printed_loss"
GPU_SECONDS: dict[str, str] = {phase: f"gpu_{phase}_seconds" for phase in PHASES}
# one of these at least where all waits of a step were seen; a phase without had none
GPU_WAIT_SECONDS: dict[str, str] = {phase: f"gpu_{phase}_wait_seconds" for phase in PHASES}
_BATCHES = "data loader, else the calls of the model under DDP"
METRICS: tuple[Metric, ...] = (
    Metric("loss", "", "Mean of the values on which `backward()` was called in the step, "
           "before a gradient scaler.", "backward pass"),
    Metric("logged_loss", "", "Training loss as the framework itself logs it: `loss` of the "
           "Hugging Face Trainer's logs, `loss` or `train_loss` of a Lightning module.",
           "Trainer.log, LightningModule.log"),
    Metric(PRINTED_LOSS, "", "Training loss as the script prints or logs it, where a line leaves "
           "no doubt: with the step that it names, and without a rank where only the launcher "
           "passed it on.", "lines of output and logs"),
    Metric("loss_nonfinite", "0 or 1", "The loss is NaN or infinite.", "backward pass"),
    Metric(ALTERNATING, "0 or 1", "Networks train in turn, each on a loss of its own, as a "
           "generator and its critic do: backward passes ran between the steps of two optimizers.",
           "backward pass, optimizer"),
    Metric("learning_rate", "", "Of the first parameter group.", "optimizer"),
    Metric("samples", "", "Samples in this rank's batches of the step.", _BATCHES),
    Metric("tokens", "", "Elements of `input_ids`, or of the first integer matrix of each batch.",
           _BATCHES),
    Metric("samples_per_second", "1/s", "Of this rank.", _BATCHES),
    Metric("tokens_per_second", "1/s", "Of this rank.", _BATCHES),
    Metric("gradient_norm", "", "L2 norm of the reduced gradients before clipping, of this rank's "
           "shard where they are sharded.", "clip_grad_norm_, else sampled before the optimizer"),
    Metric("gradient_nonfinite", "0 or 1", "The norm of the reduced gradients is NaN or infinite.",
           "as gradient_norm"),
    Metric("gradient_norm_local", "", "L2 norm of this rank's own gradients before reduction.",
           "sampled backward passes under DDP"),
    Metric("gradient_local_nonfinite", "0 or 1", "This rank's own gradients hold NaN or infinity "
           "before reduction: the rank that brought it in.", "as gradient_norm_local"),
    Metric("replica_checksum", "", "53 bits of a sum over the bits of all parameters; equal on "
           "all replicas of a model.", "sampled after the optimizer under DDP"),
    Metric("parameters", "", "Parameters that the optimizers update.", "optimizer, once"),
    Metric("parameter_bytes", "bytes", "Their size on this rank.", "optimizer, once"),
    Metric("model_parameters", "", "All parameters of the model wrapped by DDP, frozen ones too.",
           "DistributedDataParallel, once"),
    Metric("model_layers", "", "Layers of the model wrapped by DDP: modules of the row of equal "
           "ones that holds most weights; 1 where it has none.", "DistributedDataParallel, once"),
    Metric("layer_parameters", "", "Parameters of one of these layers.",
           "DistributedDataParallel, once"),
    Metric("optimizer_state_bytes", "bytes", "State of the optimizers on this rank.",
           "optimizer, once"),
    Metric("model_flops_per_second", "FLOP/s", "6 x parameters x tokens / step time (forward and "
           "backward without recomputation or attention).", "parameters and tokens"),
    Metric("mfu_ratio", "0-1", "The same over `RANKSCOPE_PEAK_FLOPS`; missing where that is not "
           "set.", "parameters and tokens"),
    Metric("rss_bytes", "bytes", "Resident memory of the process.", "/proc/self/status"),
    Metric("rss_file_bytes", "bytes", "Its part that shows files, which the kernel takes back at "
           "need.", "/proc/self/status"),
    Metric("rss_peak_bytes", "bytes", "Its peak since the process began.", "getrusage"),
    Metric("workers_rss_bytes", "bytes", "Resident memory of the process's children, such as "
           "loader workers; pages that they share with it count.", "/proc/PID/status"),
    Metric("workers_rss_file_bytes", "bytes", "Its part that shows files.", "/proc/PID/status"),
    Metric("cuda_allocated_bytes", "bytes", "In tensors, on the current device.",
           "torch.cuda.memory_stats"),
    Metric("cuda_reserved_bytes", "bytes", "Held by the caching allocator.",
           "torch.cuda.memory_stats"),
    Metric("cuda_peak_bytes", "bytes", "Peak of allocated since the script last reset it.",
           "torch.cuda.memory_stats"),
    Metric("cuda_fragmentation_bytes", "bytes", "Reserved minus allocated.",
           "torch.cuda.memory_stats"),
    Metric("cuda_alloc_retries", "", "Allocations that had to flush the cache first, ever.",
           "torch.cuda.memory_stats"),
    Metric("cuda_ooms", "", "Allocations that failed, ever.", "torch.cuda.memory_stats"),
    Metric("pinned_bytes", "bytes", "Page-locked host memory in use.",
           "torch.cuda.host_memory_stats"),
    *(Metric(name, "s", "Time of the current stream in this phase.", "CUDA events, sampled")
      for name in GPU_SECONDS.values()),
    *(Metric(name, "s", "Its part in which the stream waited for other ranks, where all such waits "
             "were seen.", "CUDA events, sampled")
      for name in GPU_WAIT_SECONDS.values()),
)  # fmt: skip

# each of these brings a flag along
NONFINITE: dict[str, str] = {
    "loss": "loss_nonfinite",
    "gradient_norm": "gradient_nonfinite",
    "gradient_norm_local": "gradient_local_nonfinite",
}
assert {name for pair in NONFINITE.items() for name in pair} <= {metric.name for metric in METRICS}
