"""What the page of resources draws, in its order: one definition for each quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankscope.wire.metric_names import PRINTED_LOSS
from rankscope_server.api.resources.schema import Scope, Topic

Worst = Literal["high", "low", "apart"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity of each rank, GPU or node. `columns` of a kind of samples are added up."""

    key: str
    title: str
    topic: Topic
    scope: Scope
    kind: str  # of samples; "metric": a number of training
    columns: tuple[str, ...]
    unit: str
    worst: Worst
    source: str
    is_sum: bool = False  # over all ranks: a line of the job


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("gpu_memory", "GPU memory in use", "memory", "gpu", "gpu", ("memory_used_bytes",),
             "bytes", "high", "NVML, of all processes on it"),
    Quantity("cuda_allocated", "GPU memory in tensors", "memory", "rank", "metric",
             ("cuda_allocated_bytes",), "bytes", "high", "torch.cuda.memory_stats"),
    Quantity("rank_memory", "Memory of the process", "memory", "rank", "process", ("rss_bytes",),
             "bytes", "high", "resident memory in /proc"),
    Quantity("node_memory", "Memory of the node", "memory", "node", "host", ("memory_used_bytes",),
             "bytes", "high", "total minus available in /proc/meminfo"),
    Quantity("gpu_utilization", "GPU utilisation", "utilisation", "gpu", "gpu",
             ("utilization_ratio",), "ratio", "low", "NVML: share of the time in which a kernel "
             "ran"),
    Quantity("gpu_clock", "GPU clock", "utilisation", "gpu", "gpu", ("sm_clock_mhz",), "MHz", "low",
             "NVML: SM clock"),
    Quantity("gpu_power", "GPU power", "utilisation", "gpu", "gpu", ("power_watts",), "W", "apart",
             "NVML"),
    Quantity("gpu_temperature", "GPU temperature", "utilisation", "gpu", "gpu",
             ("temperature_celsius",), "\N{DEGREE SIGN}C", "high", "NVML"),
    Quantity("rank_processors", "Processors of the process", "utilisation", "rank", "process",
             ("user_us_total", "system_us_total"), "cores", "apart", "user and system time in "
             "/proc"),
    Quantity("node_processors", "Processors of the node", "utilisation", "node", "host",
             ("cpu_user_us_total", "cpu_system_us_total"), "ratio", "apart",
             "user and system time in /proc/stat, share of all processors"),
    Quantity("logged_loss", "Loss as the framework logs it", "training", "rank", "metric",
             ("logged_loss",), "", "apart", "the framework's log"),
    Quantity("printed_loss", "Loss as the script prints it", "training", "rank", "metric",
             (PRINTED_LOSS,), "", "apart", "lines of output"),
    Quantity("loss", "Loss of backward()", "training", "rank", "metric", ("loss",), "", "apart",
             "each rank's own batch"),
    Quantity("gradient_norm", "Gradient norm, reduced", "training", "rank", "metric",
             ("gradient_norm",), "", "apart", "before clipping; of a rank's shard where sharded"),
    Quantity("gradient_norm_local", "Gradient norm before reduction", "training", "rank", "metric",
             ("gradient_norm_local",), "", "apart", "each rank's own gradients, sampled"),
    Quantity("learning_rate", "Learning rate", "training", "rank", "metric", ("learning_rate",), "",
             "apart", "the optimizer's first parameter group"),
    Quantity("job_tokens_given", "Tokens/s of the job", "training", "job", "metric",
             ("job_tokens_per_second",), "tokens/s", "low", "what the script gives of whole steps"),
    Quantity("job_tokens", "Tokens/s, sum over ranks", "training", "job", "metric",
             ("tokens_per_second",), "tokens/s", "low", "ranks that share a batch count it each",
             is_sum=True),
    Quantity("tokens_per_second", "Tokens/s of each rank", "training", "rank", "metric",
             ("tokens_per_second",), "tokens/s", "low", "its own batches"),
    Quantity("job_samples", "Samples/s, sum over ranks", "training", "job", "metric",
             ("samples_per_second",), "samples/s", "low", "ranks that share a batch count it each",
             is_sum=True),
    Quantity("samples_per_second", "Samples/s of each rank", "training", "rank", "metric",
             ("samples_per_second",), "samples/s", "low", "its own batches"),
    Quantity("mfu_ratio", "Model FLOPs utilisation", "training", "rank", "metric", ("mfu_ratio",),
             "ratio", "low", "parameters and tokens over RANKSCOPE_PEAK_FLOPS"),
)  # fmt: skip
