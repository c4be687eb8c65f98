"""Machines over the last ten minutes, in stretches of ten seconds, and the newest of what wears.

Node samples carry no attempt, so one table serves all attempts of a run. Chunks are taken once;
their order does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.chunk import Column
from rankscope.wire.schema import Event

STRETCH_SECONDS = 10
NUM_STRETCHES = 60
_STRETCH_NS = STRETCH_SECONDS * 10**9
_MAX_DEVICES = 65_536
_MAX_EVENTS = 4096
# reasons for lower clocks: rankscope.wire.nvidia_codes
HARD_THROTTLE = 0x020 | 0x040 | 0x080  # thermal by software and hardware, power brake
HARD_SLOWDOWN = 0x008
POWER_CAP = 0x004

GPU_COLUMNS: tuple[str, ...] = (
    "utilization_ratio", "sm_clock_mhz", "power_watts", "temperature_celsius", "memory_used_bytes",
    "memory_total_bytes", "throttled", "power_capped", "sm_ratio", "tensor_ratio",
)  # fmt: skip
HOST_COLUMNS: tuple[str, ...] = (
    "cpu_user_us_total", "cpu_system_us_total", "cpu_iowait_us_total", "cpu_steal_us_total",
    "num_cpus", "runnable", "memory_total_bytes", "memory_available_bytes", "major_faults_total",
    "oom_kills_total",
)  # fmt: skip
CGROUP_COLUMNS: tuple[str, ...] = (
    "memory_bytes", "memory_limit_bytes", "cpu_us_total", "cpu_limit_cores", "throttled_us_total",
    "oom_kills_total",
)  # fmt: skip
DISK_COLUMNS: tuple[str, ...] = ("busy_us_total", "read_bytes_total")
HEALTH_COLUMNS: tuple[str, ...] = (
    "ecc_corrected", "ecc_uncorrected", "remap_pending", "remap_failed", "retire_pending",
    "sm_clock_max_mhz", "power_limit_watts", "pcie_width", "pcie_width_max",
)  # fmt: skip
EVENTS = frozenset({
    "xid", "switch xid", "gpu ecc error", "oom kill", "gpu does not answer", "hardware error",
})  # fmt: skip
_KINDS: dict[str, tuple[tuple[str, ...], str]] = {  # kind -> columns, what makes a row unique
    "gpu": (GPU_COLUMNS, "gpu"),
    "gpu_activity": (GPU_COLUMNS, "gpu"),
    "host": (HOST_COLUMNS, ""),
    "cgroup": (CGROUP_COLUMNS, "cgroup"),
    "disk": (DISK_COLUMNS, "device"),
}
Device: TypeAlias = tuple[str, str]  # host, name of the device ("" for the host itself)


@dataclass(slots=True)
class Series:
    """One device: sums, counts and newest values by stretch, columns as in the kind's tuple."""

    stretch: NDArray[np.int64]
    total: NDArray[np.float64]
    count: NDArray[np.int64]
    newest: NDArray[np.float64]
    newest_ns: NDArray[np.int64]


@dataclass(slots=True)
class Health:
    """The first and the newest word of a GPU on what wears, by column; -1 not known."""

    first_ns: int
    first: NDArray[np.float64]
    last_ns: int
    last: NDArray[np.float64]


@dataclass(slots=True)
class MachineTable:
    """What the collectors of all nodes say."""

    devices: dict[str, dict[Device, Series]] = field(default_factory=dict)  # by kind
    health: dict[Device, Health] = field(default_factory=dict)
    gpu_of_rank: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    events: dict[tuple[int, str, str], Event] = field(default_factory=dict)
    _recent: tuple[list[Device], NDArray[Any]] | None = None  # until more samples come

    def take_event(self, event: Event) -> None:
        """Take what happened to the hardware."""
        if event.name not in EVENTS:
            return
        self.events[event.time_ns, event.name, repr(sorted(event.fields.items()))] = event
        if len(self.events) > _MAX_EVENTS:
            del self.events[min(self.events)]

    def take_chunk(self, kind: str, host: str, columns: Mapping[str, Column]) -> None:
        """Take samples of one node."""
        if kind == "gpu_health":
            self._take_health(host, columns)
        elif kind == "gpu_process":
            self._take_processes(host, columns)
        elif kind in _KINDS:
            self._take_samples(kind, host, columns)

    def _take_samples(self, kind: str, host: str, columns: Mapping[str, Column]) -> None:
        names, key = _KINDS[kind]
        times = np.asarray(columns["time_ns"], np.int64)
        values = np.stack([_column(columns, name, len(times)) for name in names], axis=1)
        devices = [str(column) for column in columns[key]] if key else [""] * len(times)
        self._recent = None
        store = self.devices.setdefault("gpu" if kind == "gpu_activity" else kind, {})
        for device in dict.fromkeys(devices):
            rows = np.array([one == device for one in devices])
            series = store.get((host, device))
            if series is None:
                if len(store) >= _MAX_DEVICES:
                    return
                series = store[host, device] = _empty(len(names))
            _add(series, times[rows], values[rows])

    def _take_health(self, host: str, columns: Mapping[str, Column]) -> None:
        times = np.asarray(columns["time_ns"], np.int64)
        values = np.stack([_column(columns, name, len(times)) for name in HEALTH_COLUMNS], axis=1)
        for at, gpu in enumerate(columns["gpu"]):
            key, now = (host, str(gpu)), int(times[at])
            known = self.health.get(key)
            if known is None:
                self.health[key] = Health(now, values[at], now, values[at])
                continue
            if now < known.first_ns:
                known.first_ns, known.first = now, values[at]
            if now > known.last_ns:
                known.last_ns, known.last = now, values[at]

    def _take_processes(self, host: str, columns: Mapping[str, Column]) -> None:
        rows = zip(columns["time_ns"], columns["gpu"], columns["rank"], strict=True)
        for time_ns, gpu, rank in rows:
            if int(rank) >= 0:
                key = (host, int(rank))
                self.gpu_of_rank[key] = max(
                    (int(time_ns), int(gpu)), self.gpu_of_rank.get(key, (-1, -1))
                )

    # --- reading -----------------------------------------------------------------------------

    def rank_on(self, host: str, gpu: str, local_ranks: Mapping[tuple[str, int], int]) -> int:
        """Return the rank on a GPU: by its process, else by its local rank; -1 not known."""
        for (where, rank), (_, number) in self.gpu_of_rank.items():
            if where == host and str(number) == gpu and rank in local_ranks.values():
                return rank
        return local_ranks.get((host, int(gpu)), -1) if gpu.isdigit() else -1

    def newest(self, kind: str, device: Device, name: str) -> float | None:
        """Return the newest value of a column."""
        series = self.devices.get(kind, {}).get(device)
        if series is None:
            return None
        column = _KINDS[kind][0].index(name)
        at = int(np.argmax(series.newest_ns[:, column]))
        return float(series.newest[at, column]) if series.newest_ns[at, column] > 0 else None

    def rate(self, kind: str, device: Device, name: str, seconds: float = 120.0) -> float | None:
        """Return how fast a counter rose over the last `seconds`, in its unit per second."""
        series = self.devices.get(kind, {}).get(device)
        if series is None:
            return None
        column = _KINDS[kind][0].index(name)
        times, values = series.newest_ns[:, column], series.newest[:, column]
        known = np.flatnonzero(times > 0)
        known = known[times[known] >= times.max() - seconds * 1e9] if len(known) else known
        if len(known) < 2:
            return None
        known = known[np.argsort(times[known])]
        took = (times[known[-1]] - times[known[0]]) / 1e9
        rose = values[known[-1]] - values[known[0]]
        return float(rose / took) if took > 0 and rose >= 0 else None

    def means(self, name: str, stretches: int) -> tuple[list[Device], NDArray[Any]]:
        """Return a column of all GPUs over the newest stretches, GPUs x stretches, NaN unknown."""
        if self._recent is None:
            self._recent = self._means()
        devices, cells = self._recent
        return devices, cells[:, -stretches:, GPU_COLUMNS.index(name)].copy()

    def _means(self) -> tuple[list[Device], NDArray[Any]]:
        """Return the means of all columns, GPUs x stretches x columns, oldest stretch first."""
        store = self.devices.get("gpu", {})
        newest = max((int(series.stretch.max()) for series in store.values()), default=0)
        wanted = np.arange(newest - NUM_STRETCHES + 1, newest + 1)
        slots = wanted % NUM_STRETCHES
        if not store:
            return [], np.zeros((0, NUM_STRETCHES, len(GPU_COLUMNS)))
        total = np.stack([series.total[slots] for series in store.values()])
        count = np.stack([series.count[slots] for series in store.values()])
        known = np.stack([series.stretch[slots] == wanted for series in store.values()])
        good = known[:, :, None] & (count > 0)
        return list(store), np.where(good, total / np.maximum(count, 1), np.nan)


def _empty(num_columns: int) -> Series:
    shape = (NUM_STRETCHES, num_columns)
    return Series(
        np.full(NUM_STRETCHES, -1, np.int64), np.zeros(shape), np.zeros(shape, np.int64),
        np.zeros(shape), np.zeros(shape, np.int64),
    )  # fmt: skip


def _add(series: Series, times: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    stretches = times // _STRETCH_NS
    begins = np.flatnonzero(np.diff(stretches, prepend=-1))
    columns = np.arange(values.shape[1])
    for begin, end in zip(begins, [*begins[1:], len(times)], strict=True):
        stretch, part = int(stretches[begin]), values[begin:end]
        slot = stretch % NUM_STRETCHES
        if stretch < series.stretch[slot]:
            continue  # older than what is kept
        if stretch > series.stretch[slot]:
            series.stretch[slot] = stretch
            for cells in (series.total, series.count, series.newest, series.newest_ns):
                cells[slot] = 0
        known = part >= 0
        series.total[slot] += np.where(known, part, 0.0).sum(axis=0)
        series.count[slot] += known.sum(axis=0)
        last = len(part) - 1 - np.argmax(known[::-1], axis=0)  # newest known row by column
        at = times[begin:end][last]
        news = known.any(axis=0) & (at >= series.newest_ns[slot])
        series.newest[slot, news] = part[last, columns][news]
        series.newest_ns[slot, news] = at[news]


def _column(columns: Mapping[str, Column], name: str, count: int) -> NDArray[np.float64]:
    """Return a column as floats, -1 where not known; made from the throttle bits where derived."""
    if name in ("throttled", "power_capped"):
        reasons = columns.get("throttle_reasons")
        if reasons is None:
            return np.full(count, -1.0)
        bits = np.asarray(reasons, np.int64)
        mask = POWER_CAP if name == "power_capped" else HARD_THROTTLE | HARD_SLOWDOWN
        return np.where(bits < 0, -1.0, (bits & mask) != 0)
    values = columns.get(name)
    return np.full(count, -1.0) if values is None else np.asarray(values, np.float64)
