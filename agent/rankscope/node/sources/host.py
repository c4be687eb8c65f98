"""The host: load and memory, pressure, disks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.files import need, pairs, read, read_or_none, read_whole
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.schema import ChunkKind

_US_PER_TICK = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# of /proc/meminfo, kB
_MEMORY = {
    "MemTotal": "memory_total_bytes",
    "MemAvailable": "memory_available_bytes",
    "Cached": "memory_cached_bytes",
    "Dirty": "memory_dirty_bytes",
    "SwapTotal": "swap_total_bytes",
}
# of /proc/vmstat: column and factor
_EVENTS = {
    "pswpin": ("swap_in_bytes_total", _PAGE_BYTES),
    "pswpout": ("swap_out_bytes_total", _PAGE_BYTES),
    "pgfault": ("page_faults_total", 1),
    "pgmajfault": ("major_faults_total", 1),
    "oom_kill": ("oom_kills_total", 1),
}


class HostSource(SampleSource):
    """Processors, run queue, memory, swap, page faults, free space of the run directory."""

    name: ClassVar[str] = "host"
    kind: ClassVar[ChunkKind | None] = "host"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._proc = str(machine.proc)
        self._cores: list[tuple[int, int]] = []  # (busy, all) ticks of each, at the last row

    def open(self) -> None:
        """Raise Skipped where there is no /proc."""
        need(self._machine.proc / "stat", "not a Linux host, or /proc is not mounted")

    def sample(self) -> Iterable[Row]:
        """Return one row."""
        row: dict[str, float | str] = {}
        row |= self._processors()
        row |= self._load()
        row |= _memory(read_or_none(f"{self._proc}/meminfo") or "")
        for name, value in pairs(read_or_none(f"{self._proc}/vmstat") or ""):
            if name in _EVENTS:
                column, factor = _EVENTS[name]
                row[column] = value * factor
        try:
            disk = os.statvfs(self._machine.run_directory)
            row["run_disk_free_bytes"] = disk.f_bavail * disk.f_frsize
        except OSError:
            pass  # the column stays unknown
        return [row]

    def _processors(self) -> Row:
        """Return CPU times of the whole machine and the busiest processor of this interval."""
        row: dict[str, float | str] = {}
        cores: list[tuple[int, int]] = []
        whole: list[int] = []
        for line in read_whole(f"{self._proc}/stat").splitlines():
            name, _, rest = line.partition(" ")
            if name.startswith("cpu"):
                ticks = [int(word) for word in rest.split()[:8]]
                if name == "cpu":
                    whole = ticks
                else:  # user nice system idle iowait irq softirq steal
                    cores.append((sum(ticks) - sum(ticks[3:5]) - sum(ticks[7:]), sum(ticks)))
            elif name == "ctxt":
                row["context_switches_total"] = int(rest)
            elif name == "procs_blocked":
                row["blocked"] = int(rest)
        count = len(cores) or 1
        if len(whole) == 8:
            user, nice, system, idle, iowait, irq, softirq, steal = (
                ticks * _US_PER_TICK // count for ticks in whole
            )
            row["cpu_user_us_total"] = user + nice
            row["cpu_system_us_total"] = system + irq + softirq
            row["cpu_iowait_us_total"] = iowait
            row["cpu_steal_us_total"] = steal
            row["cpu_idle_us_total"] = idle
            row["num_cpus"] = count
        if len(cores) == len(self._cores):
            shares = [
                (busy - busy_before) / (total - total_before)
                for (busy, total), (busy_before, total_before) in zip(
                    cores, self._cores, strict=True
                )
                if total > total_before
            ]
            if shares:
                row["cpu_busiest_ratio"] = min(max(*shares, 0.0), 1.0)
        self._cores = cores
        return row

    def _load(self) -> Row:
        words = read(f"{self._proc}/loadavg").split()
        if len(words) < 4:
            return {}
        # minus this thread, which is running while it looks
        return {"load_1m": float(words[0]), "runnable": max(int(words[3].split("/")[0]) - 1, 0)}


def _memory(text: str) -> Row:
    known = dict(pairs(text))
    row: dict[str, float | str] = {
        column: known[name] << 10 for name, column in _MEMORY.items() if name in known
    }
    if "MemTotal" in known and "MemAvailable" in known:
        row["memory_used_bytes"] = (known["MemTotal"] - known["MemAvailable"]) << 10
    if "SwapTotal" in known and "SwapFree" in known:
        row["swap_used_bytes"] = (known["SwapTotal"] - known["SwapFree"]) << 10
    return row


# `full` of the processor says nothing for a whole machine
_WANTED = (("cpu", "some"), ("memory", "some"), ("memory", "full"), ("io", "some"), ("io", "full"))


class PressureSource(SampleSource):
    """Time in which some or all tasks waited for processor, memory or disk."""

    name: ClassVar[str] = "pressure"
    kind: ClassVar[ChunkKind | None] = "pressure"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._directory = machine.proc / "pressure"

    def open(self) -> None:
        """Raise Skipped where the kernel does not count it."""
        need(self._directory / "cpu", "the kernel is older than 4.20 or was started without psi=1")

    def sample(self) -> Iterable[Row]:
        """Return one row."""
        texts = {
            name: read_or_none(self._directory / name) or "" for name in ("cpu", "memory", "io")
        }
        row: dict[str, float | str] = {}
        for name, kind in _WANTED:
            for line in texts[name].splitlines():
                first, *rest = line.split()
                totals = [word[6:] for word in rest if word.startswith("total=")]
                if first == kind and totals:
                    row[f"{name}_{kind}_us_total"] = int(totals[0])
        return [row]


_SECTOR_BYTES = 512  # the unit of /proc/diskstats, whatever the disk's own is
_MAX_DISKS = 32
_IN_MEMORY = ("loop", "ram", "zram", "fd", "sr")


class DiskSource(SampleSource):
    """Bytes, operations and busy time of each whole disk; partitions are part of theirs."""

    name: ClassVar[str] = "disk"
    kind: ClassVar[ChunkKind | None] = "disk"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._block = machine.sys / "block"
        self._file = machine.proc / "diskstats"
        self._disks: frozenset[str] = frozenset()

    def open(self) -> None:
        """Find the disks that are devices. Raises Skipped where none is to be seen."""
        need(self._file, "no block devices in this kernel, or /proc is cut down")
        try:
            names = sorted(os.listdir(self._block))
        except OSError as error:
            raise Skipped(f"{self._block}: {error.strerror}") from error
        names = [name for name in names if not name.startswith(_IN_MEMORY)]
        # device mapper and RAID stand on devices: counting both would count twice
        devices = [name for name in names if (self._block / name / "device").exists()]
        self._disks = frozenset((devices or names)[:_MAX_DISKS])
        if not self._disks:
            raise Skipped(f"no disk in {self._block}")

    def sample(self) -> Iterable[Row]:
        """Return one row for each disk."""
        rows: list[Row] = []
        for line in read_whole(self._file).splitlines():
            words = line.split()
            if len(words) < 14 or words[2] not in self._disks:
                continue
            values = [int(word) for word in words[3:14]]
            rows.append({
                "device": words[2],
                "reads_total": values[0],
                "read_bytes_total": values[2] * _SECTOR_BYTES,
                "read_us_total": values[3] * 1000,
                "writes_total": values[4],
                "written_bytes_total": values[6] * _SECTOR_BYTES,
                "write_us_total": values[7] * 1000,
                "in_flight": values[8],
                "busy_us_total": values[9] * 1000,
            })  # fmt: skip
        return rows
