"""What samples say of ranks: waiting for a processor, clocks of their GPUs, connections.

Samples may come in any order and any number of times; the newest `CAPACITY` of each rank or GPU
are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankscope.wire.chunk import Column
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.connection_table import ConnectionTable

CAPACITY = 1024  # a quarter of an hour at one sample a second; 25 MB for 1,024 ranks and GPUs
KINDS = frozenset({"process", "gpu", "gpu_process", "connections"})
_VALUES: dict[str, tuple[str, ...]] = {
    "process": (
        "run_delay_us_total",
        "stopped_by",
        "pid",
        "cpus_allowed",
        "throttled_us_total",
        "cpu_limit_millicores",
    ),
    "gpu": ("sm_clock_mhz", "throttle_reasons"),
}


class SampleTable:
    """The newest samples of all ranks and GPUs of a run."""

    def __init__(self) -> None:
        self.connections = ConnectionTable()
        self._samples: dict[tuple[str, object], Array] = {}  # rows: time, values
        self._gpu_of: dict[int, tuple[str, int]] = {}

    def add(self, host: str, kind: str, columns: Mapping[str, Column]) -> None:
        """Take one chunk of samples of a host."""
        if kind == "connections":
            self.connections.add(host, columns)
            return
        if kind == "gpu_process":
            named = zip(
                np.asarray(columns["rank"]).tolist(), np.asarray(columns["gpu"]).tolist(),
                strict=True,
            )  # fmt: skip
            self._gpu_of.update({rank: (host, gpu) for rank, gpu in named if rank >= 0})
            return
        names = ("time_ns", *_VALUES[kind])
        nothing = np.full(len(columns["time_ns"]), -1)  # for what an older agent does not send
        rows = np.stack([np.asarray(columns.get(name, nothing), np.int64) for name in names], 1)
        owner = np.asarray(columns["rank" if kind == "process" else "gpu"], np.int64)
        for number in np.unique(owner[owner >= 0]).tolist():
            key = (kind, number if kind == "process" else (host, number))
            mine = rows[owner == number]
            known = self._samples.get(key)
            together = mine if known is None else np.concatenate([known, mine])
            self._samples[key] = np.unique(together, axis=0)[-CAPACITY:]

    def run_delay_ratio(self, rank: int, begin_ns: float, end_ns: float) -> float | None:
        """Return which share of a time a rank was ready to run and had no processor."""
        return self._ratio(rank, 1, begin_ns, end_ns)

    def is_throttled(self, rank: int) -> bool:
        """Return whether a rank's control group may ever not have been let run, by its limit."""
        samples = self._samples.get(("process", rank))
        return samples is not None and samples[-1, 5] != 0

    def throttled_ratio(self, rank: int, begin_ns: float, end_ns: float) -> float | None:
        """Return which share of a time a rank's control group was not let run, by its limit."""
        samples = self._samples.get(("process", rank))
        if samples is not None and samples[-1, 5] == 0:  # the usual case, without a search
            return 0.0
        return self._ratio(rank, 5, begin_ns, end_ns)

    def cpu_limit_cores(self, rank: int, begin_ns: float, end_ns: float) -> float | None:
        """Return the newest limit of its control group, in processors; None where it has none."""
        samples = self._within(("process", rank), begin_ns, end_ns)
        return None if samples is None or samples[-1, 6] <= 0 else float(samples[-1, 6]) / 1000

    def _ratio(self, rank: int, column: int, begin_ns: float, end_ns: float) -> float | None:
        """Return how much of a time a counter of us rose, None where that is not known."""
        samples = self._within(("process", rank), begin_ns, end_ns)
        if samples is None:
            return None
        times, totals = samples[:, 0], samples[:, column]
        steps = np.diff(totals)
        if np.any(totals < 0) or np.any(steps < 0):  # not reported, or the counter began anew
            return None
        return float(steps.sum() * 1000 / (times[-1] - times[0]))

    def stopped_by(self, rank: int, pid: int) -> tuple[Array, Array]:
        """Return when a rank's process was sampled, ns, and what kept it stopped, 0 for nothing.

        A rank that was started again is another process.
        """
        samples = self._samples.get(("process", rank))
        if samples is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        inside = samples[(samples[:, 3] == pid) & (samples[:, 2] >= 0)]
        return inside[:, 0], inside[:, 2]

    def cpus_allowed(self, rank: int, begin_ns: float, end_ns: float) -> float | None:
        """Return on how many processors a rank's training thread might run, the median."""
        samples = self._within(("process", rank), begin_ns, end_ns)
        if samples is None or np.any(samples[:, 4] <= 0):
            return None
        return float(np.median(samples[:, 4]))

    def gpu(self, rank: int, begin_ns: float, end_ns: float) -> tuple[float, int] | None:
        """Return the median SM clock in MHz, and the throttle bits set in most samples."""
        place = self._gpu_of.get(rank)
        samples = None if place is None else self._within(("gpu", place), begin_ns, end_ns)
        if samples is None or np.any(samples[:, 1] < 0):
            return None
        bits = np.maximum(samples[:, 2], 0)
        mostly = sum(1 << n for n in range(16) if np.mean(bits >> n & 1) > 0.5)
        return float(np.median(samples[:, 1])), mostly

    def _within(self, key: tuple[str, object], begin_ns: float, end_ns: float) -> Array | None:
        samples = self._samples.get(key)
        if samples is None:
            return None
        inside = samples[(samples[:, 0] >= begin_ns) & (samples[:, 0] <= end_ns)]
        return inside if len(inside) >= 3 else None
