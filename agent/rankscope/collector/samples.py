"""Samples of the host, once a second, from /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.collector.exits import PROC
from rankscope.schema import HOST_COLUMNS

Row = tuple[float, ...]
_NOT_KNOWN = -1
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostSampler:
    """Reads one row of schema.HOST_COLUMNS at a time; ratios are since the row before."""

    def __init__(
        self,
        disk: Path,
        proc: Path = PROC,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._disk = disk
        self._proc = proc
        self._wall_ns = wall_ns
        self._last_times = self._cpu_times()

    def sample(self) -> Row:
        """Return one row, -1 for what this host does not tell."""
        memory = self._table("meminfo", scale=1024)
        total, available = memory.get("MemTotal:"), memory.get("MemAvailable:")
        swap, swap_free = memory.get("SwapTotal:"), memory.get("SwapFree:")
        sent, received = self._network()
        values: dict[str, float] = {
            "time_ns": self._wall_ns(),
            **self._cpu_ratios(),
            **self._load(),
            "memory_used_bytes": _difference(total, available),
            "memory_total_bytes": _NOT_KNOWN if total is None else total,
            "swap_used_bytes": _difference(swap, swap_free),
            "disk_free_bytes": self._disk_free(),
            "net_sent_bytes": sent,
            "net_received_bytes": received,
            "major_faults": self._table("vmstat").get("pgmajfault", _NOT_KNOWN),
        }
        return tuple(values[name] for name in HOST_COLUMNS)

    def _cpu_times(self) -> list[int]:
        """Return ticks since boot: user nice system idle iowait irq softirq steal."""
        words = self._text("stat").partition("\n")[0].split()[1:9]
        return [int(word) for word in words] if len(words) == 8 else []

    def _cpu_ratios(self) -> dict[str, float]:
        now, before = self._cpu_times(), self._last_times
        self._last_times = now
        deltas = [after - earlier for after, earlier in zip(now, before, strict=False)]
        total = sum(deltas)
        if len(deltas) != 8 or total <= 0:
            return {"cpu_ratio": -1.0, "steal_ratio": -1.0, "iowait_ratio": -1.0}
        idle, iowait, steal = deltas[3], deltas[4], deltas[7]
        busy = total - idle - iowait - steal
        return {
            "cpu_ratio": busy / total,
            "steal_ratio": steal / total,
            "iowait_ratio": iowait / total,
        }

    def _load(self) -> dict[str, float]:
        words = self._text("loadavg").split()
        if len(words) < 4:
            return {"load_1m": -1.0, "runnable": -1}
        return {"load_1m": float(words[0]), "runnable": int(words[3].partition("/")[0])}

    def _network(self) -> tuple[int, int]:
        """Return bytes sent and received since boot, over all interfaces but loopback."""
        sent = received = 0
        lines = self._text("net/dev").splitlines()[2:]
        if not lines:
            return _NOT_KNOWN, _NOT_KNOWN
        for line in lines:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            if name.strip() != "lo" and len(fields) >= 9:
                received += int(fields[0])
                sent += int(fields[8])
        return sent, received

    def _disk_free(self) -> int:
        try:
            disk = os.statvfs(self._disk)
        except OSError:
            return _NOT_KNOWN
        return disk.f_bavail * disk.f_frsize

    def _table(self, name: str, scale: int = 1) -> dict[str, int]:
        rows = (line.split() for line in self._text(name).splitlines())
        return {row[0]: int(row[1]) * scale for row in rows if len(row) >= 2 and row[1].isdigit()}

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text()
        except OSError:
            return ""


class ProcessSampler:
    """CPU time and memory of single processes."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc

    def sample(self, pid: int) -> tuple[float, int]:
        """Return (CPU seconds, resident bytes), zeros for a process that is gone."""
        try:
            stat = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return 0.0, 0
        return (int(stat[11]) + int(stat[12])) / _CLOCK_TICKS, int(stat[21]) * _PAGE_BYTES


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


def _difference(whole: int | None, part: int | None) -> int:
    return _NOT_KNOWN if whole is None or part is None else max(0, whole - part)
