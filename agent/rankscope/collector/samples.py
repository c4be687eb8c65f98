"""Samples of the host and of single processes, once a second, by psutil."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rankscope.collector.exits import PROC
from rankscope.schema import HOST_COLUMNS

Row = tuple[float, ...]
_NOT_KNOWN = -1
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class HostSampler:
    """Reads one row of schema.HOST_COLUMNS at a time; ratios are since the row before."""

    def __init__(
        self,
        disk: Path,
        proc: Path = PROC,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        psutil.PROCFS_PATH = str(proc)
        self._disk = disk
        self._proc = proc
        self._wall_ns = wall_ns
        self._last_times = self._cpu_times()

    def sample(self) -> Row:
        """Return one row, -1 for what this host does not tell."""
        memory, swap = _ask(psutil.virtual_memory), _ask(psutil.swap_memory)
        disk = _ask(lambda: psutil.disk_usage(str(self._disk)))
        sent, received = _network()
        values: dict[str, float] = {
            "time_ns": self._wall_ns(),
            **self._cpu_ratios(),
            **self._load(),
            "memory_used_bytes": memory.total - memory.available if memory else _NOT_KNOWN,
            "memory_total_bytes": memory.total if memory else _NOT_KNOWN,
            "swap_used_bytes": swap.used if swap else _NOT_KNOWN,
            "disk_free_bytes": disk.free if disk else _NOT_KNOWN,
            "net_sent_bytes": sent,
            "net_received_bytes": received,
            "major_faults": self._major_faults(),
        }
        return tuple(values[name] for name in HOST_COLUMNS)

    def _cpu_times(self) -> list[float]:
        times = _ask(psutil.cpu_times)
        return [getattr(times, state, 0.0) for state in _CPU_STATES] if times else []

    def _cpu_ratios(self) -> dict[str, float]:
        now, before = self._cpu_times(), self._last_times
        self._last_times = now
        deltas = [after - earlier for after, earlier in zip(now, before, strict=False)]
        total = sum(deltas)
        if not deltas or total <= 0:
            return {"cpu_ratio": -1.0, "steal_ratio": -1.0, "iowait_ratio": -1.0}
        spent = dict(zip(_CPU_STATES, deltas, strict=True))
        busy = total - spent["idle"] - spent["iowait"] - spent["steal"]
        return {
            "cpu_ratio": busy / total,
            "steal_ratio": spent["steal"] / total,
            "iowait_ratio": spent["iowait"] / total,
        }

    def _load(self) -> dict[str, float]:
        """Return load and run queue; psutil does not tell the latter."""
        words = self._text("loadavg").split()
        if len(words) < 4:
            return {"load_1m": -1.0, "runnable": -1}
        return {"load_1m": float(words[0]), "runnable": int(words[3].partition("/")[0])}

    def _major_faults(self) -> int:
        """Return the host's major page faults since boot, which psutil does not tell."""
        for line in self._text("vmstat").splitlines():
            name, _, count = line.partition(" ")
            if name == "pgmajfault":
                return int(count)
        return _NOT_KNOWN

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:
            return ""


class ProcessSampler:
    """CPU time and memory of single processes."""

    def sample(self, pid: int) -> tuple[float, int]:
        """Return (CPU seconds, resident bytes), zeros for a process that is gone."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:
            return 0.0, 0
        return float(times.user + times.system), int(memory.rss)


def _network() -> tuple[int, int]:
    """Return bytes sent and received since boot, over all interfaces but loopback."""
    counters = _ask(lambda: psutil.net_io_counters(pernic=True))
    if not counters:
        return _NOT_KNOWN, _NOT_KNOWN
    cards = [card for name, card in counters.items() if name != "lo"]
    return sum(card.bytes_sent for card in cards), sum(card.bytes_recv for card in cards)


def _ask(question: Callable[[], Any]) -> Any:
    """Return psutil's answer, None where this host does not tell."""
    try:
        return question()
    except (OSError, RuntimeError, LookupError, ValueError, psutil.Error):
        return None


class SampleThread(threading.Thread):
    """Calls `take` every so often and keeps the rows; a slow driver delays only this thread."""

    MAX_ROWS = 4096  # in memory; a collector that is that late keeps the newest

    def __init__(self, name: str, take: Callable[[], list[Row]], seconds: float) -> None:
        super().__init__(name=f"rankscope-{name}", daemon=True)
        self._take = take
        self._seconds = seconds
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self.failure: str = ""  # why sampling stopped, if it did

    def run(self) -> None:
        """Sample for ever."""
        due = time.monotonic()
        while True:
            try:
                rows = self._take()
            except Exception as error:  # noqa: BLE001 - guard of this thread: /proc and drivers vary
                self.failure = f"{type(error).__name__}: {error}"
                return
            with self._lock:
                self._rows = (self._rows + rows)[-self.MAX_ROWS :]
            due = max(due + self._seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def take_rows(self) -> list[Row]:
        """Return the rows since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows
