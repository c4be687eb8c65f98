"""Samples of the GPUs of a node, and the counters of their health."""

from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from tests.analysis.simulator import START_NS

SECOND = 10**9


def gpu_columns(
    num_gpus: int, seconds: int, seed: int = 0, start_s: int = 0, **changes: np.ndarray
) -> dict[str, np.ndarray]:
    """Return samples of one node, one a second; `changes` are gpus x seconds or one number."""
    chance = np.random.default_rng(seed)
    shape = (num_gpus, seconds)
    usual = {
        "utilization_ratio": np.clip(0.95 + 0.02 * chance.normal(size=shape), 0, 1),
        "sm_clock_mhz": 1700 + 10 * chance.normal(size=shape),
        "power_watts": 600 + 10 * chance.normal(size=shape),
        "temperature_celsius": 65 + 1.5 * chance.normal(size=(num_gpus, 1))
        + 0.5 * chance.normal(size=shape),
        "throttle_reasons": np.zeros(shape),
        "memory_used_bytes": np.full(shape, 60e9),
        "memory_total_bytes": np.full(shape, 80e9),
    }  # fmt: skip
    for name, value in changes.items():
        usual[name] = np.broadcast_to(value, shape)
    floats = schema.FLOAT_COLUMNS
    columns = {
        name: np.full(num_gpus * seconds, -1, np.float32 if name in floats else np.int64)
        for name in schema.CHUNK_COLUMNS["gpu"]
    }
    columns["time_ns"] = np.tile(START_NS + (start_s + np.arange(seconds)) * SECOND, num_gpus)
    columns["gpu"] = np.repeat(np.arange(num_gpus), seconds)
    for name, value in usual.items():
        columns[name] = value.reshape(-1).astype(columns[name].dtype)
    return columns


def health(values: dict[str, list[int]], at_s: int) -> dict[str, np.ndarray]:
    count = len(next(iter(values.values())))
    columns = {name: np.full(count, -1, np.int64) for name in schema.CHUNK_COLUMNS["gpu_health"]}
    columns["time_ns"] = np.full(count, START_NS + at_s * SECOND)
    columns["gpu"] = np.arange(count)
    for name, numbers in values.items():
        columns[name] = np.array(numbers)
    return columns
