"""Formulas of the field as pure functions, each with its source. No dependencies.

Durations are in one unit of the caller's choice unless a name says otherwise; ratios are 0-1.
"""

from __future__ import annotations

import math

# 1 / Phi^-1(3/4): makes the median absolute deviation of a normal sample estimate its sigma
# (Rousseeuw & Croux 1993, JASA 88).
SIGMA_PER_MAD = 1.4826
# sqrt(pi / 2): the median of a normal sample scatters so much more than its mean (asymptotic).
MEDIAN_SCATTER = math.sqrt(math.pi / 2)

_TWICE = frozenset({"all_reduce", "all_reduce_coalesced"})  # 2 (n-1) / n
_ONCE = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all",
        "all_to_all_single",
    }
)  # (n-1) / n
_WHOLE = frozenset({"broadcast", "reduce", "send", "recv"})  # 1


def bus_factor(operation: str, num_ranks: int) -> float | None:
    """Return busbw / algbw (performance notes of nccl-tests), None where it is not defined."""
    if num_ranks < 2:
        return None
    share = (num_ranks - 1) / num_ranks
    if operation in _TWICE:
        return 2 * share
    if operation in _ONCE:
        return share
    return 1.0 if operation in _WHOLE else None


def algbw_bytes_per_second(size_bytes: float, duration_seconds: float) -> float | None:
    """Return total size / time (nccl-tests), None for no duration."""
    return size_bytes / duration_seconds if duration_seconds > 0 else None


def busbw_bytes_per_second(
    operation: str, size_bytes: float, duration_seconds: float, num_ranks: int
) -> float | None:
    """Return the bus bandwidth, comparable over group sizes; None where it is not defined."""
    factor = bus_factor(operation, num_ranks)
    algbw = algbw_bytes_per_second(size_bytes, duration_seconds)
    return None if factor is None or algbw is None else algbw * factor


def bubble_fraction(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """Return idle / total time of a flushed pipeline over p ranks, (p-1)/(v m+p-1).

    One chunk of the model on each rank: GPipe, arXiv 1811.06965, section 2.3; 1F1B idles as much.
    Several, v: interleaved 1F1B, arXiv 2104.04473, section 2.2.2.
    """
    return (num_ranks - 1) / (num_chunks * num_microbatches + num_ranks - 1)


def throughput_loss(time_with: float, time_without: float) -> float:
    """Return the share of throughput that a cause takes: 1 - T_without / T_with, at least 0."""
    if time_with <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - time_without / time_with))


def rank_hours_per_day(world_size: int, loss_ratio: float) -> float:
    """Return the rank-hours (GPU-hours where a rank has a GPU) that a loss costs in a day."""
    return world_size * 24.0 * loss_ratio


def outlier_cut(num_samples: float) -> float:
    """Return the z beyond which one of `num_samples` normal values is no accident.

    sqrt(2 ln n) is where the largest of n standard normal values is (extreme value theory,
    Leadbetter et al. 1983); one sigma is added, so the chance of a false alarm stays small and
    does not grow with the job.
    """
    return math.sqrt(2.0 * math.log(max(num_samples, 2.0))) + 1.0


def training_flops(num_parameters: float, num_tokens: float) -> float:
    """Return the FLOPs of forward and backward, 6 N D (Kaplan et al. 2020, arXiv 2001.08361).

    Two for the forward, four for the backward pass, per parameter and token; without attention
    and without recomputation, as PaLM's MFU counts up to its attention term (appendix B).
    """
    return 6.0 * num_parameters * num_tokens


_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float16": 2, "bfloat16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype of the schema; 4 for float32, int32, unknown."""
    return _ITEM_BYTES.get(dtype, 4)


def ring_seconds(
    operation: str, size_bytes: float, num_ranks: int, bytes_per_second: float, latency: float
) -> float:
    """Return how long a ring takes: its hops, and the bytes that each rank sends.

    An all_reduce has 2 (n-1) hops, an all_gather or reduce_scatter n-1 (performance notes of
    nccl-tests; Patarasuk & Yuan 2009), a send one.
    """
    factor = bus_factor(operation, num_ranks)
    if factor is None:
        return 0.0
    hops = 1.0 if operation in _WHOLE else factor * num_ranks
    return hops * latency + factor * size_bytes / bytes_per_second


def exchange_ratio(num_workers: int, num_servers: int = 0) -> float:
    """Return how many times the model the fullest link carries in each half of an exchange.

    With servers that hold even shards it is a server's: a piece of each worker's gradient, then as
    much back (Li et al. 2014, OSDI); a worker's where there are more servers than workers. Without
    servers a ring's: reduce_scatter, then all_gather, (n-1)/n of the model each (`ring_seconds`).
    """
    if not num_servers:
        return bus_factor("all_gather", num_workers) or 0.0
    return max(1.0, num_workers / num_servers)


def tree_seconds(
    size_bytes: float, num_ranks: int, bytes_per_second: float, latency: float
) -> float:
    """Return how long an all_reduce takes over two trees: 2 log2 n hops, twice the size.

    Sanders, Speck & Traeff 2009, Parallel Computing 35; in NCCL since 2.4. Better than a ring where
    latency counts more than the last part of the bandwidth.
    """
    hops = 2 * math.ceil(math.log2(num_ranks)) if num_ranks > 1 else 0
    return hops * latency + 2 * size_bytes / bytes_per_second if hops else 0.0


def expected_slowdown(slow_share: float, slow_factor: float) -> float:
    """Return how much longer a part makes the whole, where the rest stays (Amdahl 1967).

    `slow_share` of the time takes `slow_factor` times longer; in synchronous training one rank's
    part is everybody's.
    """
    return 1.0 - slow_share + slow_share * slow_factor
