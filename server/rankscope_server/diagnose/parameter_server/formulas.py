"""Parameter servers against all_reduce, and backup workers: pure formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def server_seconds(num_workers: int, size_bytes: float, shards: int, bandwidth: float) -> float:
    """Return the seconds of an exchange over `shards` servers, 2 N S / (k B); B in bytes/s."""
    return 2.0 * num_workers * size_bytes / (shards * bandwidth)


def ring_seconds(num_workers: int, size_bytes: float, bandwidth: float) -> float:
    """Return the time of a ring all_reduce of the same bytes: 2 (N-1)/N x S / B."""
    return 2.0 * (num_workers - 1) / num_workers * size_bytes / bandwidth


def ring_is_better(
    num_workers: int, size_bytes: float, shards: int, bandwidth: float, margin: float = 1.5
) -> bool:
    """Return whether all_reduce is worth the change: servers take `margin` times as long."""
    servers = server_seconds(num_workers, size_bytes, shards, bandwidth)
    return servers > margin * ring_seconds(num_workers, size_bytes, bandwidth)


def backup_costs(worker_times: Array) -> Array:
    """Return E[T of the (N-b)th fastest] / (1 - b/N) for b = 0 ... N-1, from steps x workers.

    A synchronous step that drops the slowest b of N workers takes as long as the (N-b)th and
    learns from N-b batches (Chen et al. 2016, arXiv 1604.00981).
    """
    ordered = np.sort(worker_times, axis=1)
    count = ordered.shape[1]
    means = ordered.mean(axis=0)[::-1]  # b = 0: the slowest
    costs: Array = means / (1.0 - np.arange(count) / count)
    return costs


def best_backup(worker_times: Array) -> int:
    """Return how many backup workers cost least per batch."""
    return int(np.argmin(backup_costs(worker_times)))
