"""How long a collective of some size takes, and what other buckets would do to a DDP step.

t(S) = alpha + beta S per group and operation. In a ring of n ranks,
alpha = 2 (n-1) latencies and beta = 2 (n-1)/n over the link's bandwidth (from the
performance notes of NVIDIA's nccl-tests); an all_gather or reduce_scatter needs half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.statistics import Array

MB = 1 << 20
FIRST_BUCKET_BYTES = 1 * MB  # DDP's own: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
MIN_BUCKET_BYTES = 64 << 10  # what is smaller are losses and counters, not gradients
CAPS_MB: tuple[int, ...] = (1, 5, 10, 25, 50, 100)
_MIN_SIZE_RATIO = 2.0  # sizes closer to each other do not separate latency from bandwidth


@dataclass(frozen=True, slots=True)
class TransferModel:
    """A transfer of S bytes takes alpha_ms + beta_ms_per_byte * S."""

    alpha_ms: float
    beta_ms_per_byte: float

    def ms(self, size_bytes: float) -> float:
        """Return how long a transfer of some size takes."""
        return self.alpha_ms + self.beta_ms_per_byte * size_bytes


def fit(size_bytes: Array, took_ms: Array) -> TransferModel | None:
    """Return the model by the median slope between sizes (Theil 1950, Sen 1968).

    `took_ms` is the usual time at each size. None where sizes are too much alike.
    """
    sizes = np.unique(size_bytes)
    if len(sizes) < 2 or sizes[-1] < _MIN_SIZE_RATIO * max(sizes[0], 1):
        return None
    times = np.array([np.median(took_ms[size_bytes == size]) for size in sizes])
    first, second = np.triu_indices(len(sizes), 1)
    beta = float(np.median((times[second] - times[first]) / (sizes[second] - sizes[first])))
    if beta <= 0:
        return None
    return TransferModel(max(0.0, float(np.median(times - beta * sizes))), beta)


@dataclass(frozen=True, slots=True)
class GradientStream:
    """When gradients of a backward pass are ready, ms of the step; arrays are buckets x steps."""

    size_bytes: Array  # of each bucket as it was
    ready: Array
    begin: Array  # of backward, per step
    end: Array  # of backward, per step: from here on the rank waits

    def exposed_ms(
        self, model: TransferModel, sizes: Sequence[float], payload: float = 1.0
    ) -> Array:
        """Return per step for how long the rank waits with buckets of these sizes.

        Buckets go one after the other, each once all its gradients are ready. `payload` is the
        share of the bytes that is sent.
        """
        known = np.concatenate([[0.0], np.cumsum(self.size_bytes)])
        times = np.vstack([self.begin, self.ready])
        until = np.minimum(np.cumsum(sizes), known[-1])
        at = np.clip(np.searchsorted(known, until, side="left"), 1, len(known) - 1)
        share = (until - known[at - 1]) / (known[at] - known[at - 1])
        ready = times[at - 1] + share[:, None] * (times[at] - times[at - 1])
        ended = np.zeros(ready.shape[1])
        for bucket, size in enumerate(sizes):
            ended = np.maximum(ended, ready[bucket]) + model.ms(size * payload)
        waited: Array = np.maximum(ended - self.end, 0.0)
        return waited


def buckets_of(total_bytes: float, cap_bytes: float) -> list[float]:
    """Return the bucket sizes that DDP makes with a cap: a small first one, then full ones."""
    sizes = [min(total_bytes, FIRST_BUCKET_BYTES, cap_bytes)]
    left = total_bytes - sizes[0]
    while left > 0:
        sizes.append(min(left, cap_bytes))
        left -= sizes[-1]
    return sizes
