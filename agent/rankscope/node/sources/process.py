"""Each rank's process: processor time, memory, threads, open files, waiting, disk traffic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from rankscope.node.sources.base import RankProcess, Row, Skipped
from rankscope.node.sources.control_groups import groups_of, processors
from rankscope.node.sources.files import pairs, read, read_or_none
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.sample_columns import MACHINE_PAUSED
from rankscope.wire.schema import ChunkKind

_US_PER_TICK = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# of /proc/<pid>/stat, counted from the state
_STATE, _MINOR, _MAJOR, _USER, _SYSTEM, _THREADS, _RSS = 0, 7, 9, 11, 12, 17, 21
_STATUS = {
    "voluntary_ctxt_switches": "voluntary_switches_total",
    "nonvoluntary_ctxt_switches": "involuntary_switches_total",
}
_IO = {"read_bytes": "read_bytes_total", "write_bytes": "written_bytes_total"}
_STOPPED_BY = {"T": 1, "t": 2}
_FROZEN = 3


class ProcessSource(SampleSource):
    """Processor time, memory, threads, open files and waiting of each rank's process."""

    name: ClassVar[str] = "process"
    kind: ClassVar[ChunkKind | None] = "process"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._paused_seconds = 0.0  # before the next sample
        self._at = 0.0  # uptime of the last one
        self._cpu_us: dict[RankProcess, int] = {}  # up to it
        self._ratio: dict[RankProcess, float] = {}  # processors in use before it

    def open(self) -> None:
        """Raise Skipped where /proc does not show processes."""
        if read_or_none(self._machine.proc / "self/stat") is None:
            raise Skipped(f"no {self._machine.proc}/self/stat: /proc is not mounted")

    def sample(self) -> Iterable[Row]:
        """Return one row for each rank that lives and can be seen."""
        rows = {rank: process_row(self._machine, rank) for rank in self._machine.ranks()}
        live = {rank: row for rank, row in rows.items() if row is not None}
        for rank in self._paused(live):
            live[rank]["stopped_by"] = MACHINE_PAUSED  # its state may still be that of the pause
        return live.values()

    def overslept(self, seconds: float) -> None:
        """Ask at the next sample which ranks were paused too."""
        self._paused_seconds += seconds

    def _paused(self, rows: Mapping[RankProcess, Row]) -> list[RankProcess]:
        """Return the ranks that were paused with the collector since the last sample.

        They used less than half of the processor time that they used before in as long a time; of
        a rank that used none before, or was not there, it is not known.
        """
        cpu_us = {rank: int(row["user_us_total"]) + int(row["system_us_total"])
                  for rank, row in rows.items()}  # fmt: skip
        now = self._machine.uptime()
        seconds, paused_seconds = max(now - self._at, 1e-3), self._paused_seconds
        ratio = {rank: (cpu_us[rank] - self._cpu_us[rank]) / 1e6 / seconds
                 for rank in cpu_us if rank in self._cpu_us}  # fmt: skip
        self._at, self._cpu_us, self._paused_seconds = now, cpu_us, 0.0
        if not paused_seconds:
            self._ratio = ratio
            return []
        return [rank for rank in ratio if ratio[rank] < 0.5 * self._ratio.get(rank, 0.0)]


class ProcessSampler:
    """CPU time and memory of single processes."""

    def sample(self, pid: int) -> tuple[float, int]:
        """Return (CPU seconds, resident bytes), zeros for a process that is gone."""
        values = _stat(Path("/proc"), pid)
        if values is None:
            return 0.0, 0
        return (values[_USER] + values[_SYSTEM]) * _US_PER_TICK / 1e6, values[_RSS] * _PAGE_BYTES


def process_row(machine: Machine, rank: RankProcess) -> dict[str, float | str] | None:
    """Return the row of one process, None where it is gone."""
    values = _stat(machine.proc, rank.pid)
    if values is None:
        return None
    directory = machine.proc / str(rank.pid)
    row: dict[str, float | str] = {
        "rank": rank.rank,
        "pid": rank.pid,
        "user_us_total": values[_USER] * _US_PER_TICK,
        "system_us_total": values[_SYSTEM] * _US_PER_TICK,
        "rss_bytes": values[_RSS] * _PAGE_BYTES,
        "num_threads": values[_THREADS],
        "minor_faults_total": values[_MINOR],
        "major_faults_total": values[_MAJOR],
        "stopped_by": values[_STATE] or (_FROZEN if _is_frozen(machine, directory) else 0),
    }
    trains = directory / "task" / str(rank.thread or rank.pid)
    status = read_or_none(trains / "status") or ""
    _, has_mask, rest = status.partition("\nCpus_allowed:")
    if has_mask:
        row["cpus_allowed"] = int(rest.split(None, 1)[0].replace(",", ""), 16).bit_count()
    for name, value in pairs(status):
        if name in _STATUS:
            row[_STATUS[name]] = value
        elif name == "VmSwap":
            row["swap_bytes"] = value << 10
    for name, value in pairs(read_or_none(directory / "io") or ""):
        if name in _IO:
            row[_IO[name]] = value
    row |= _limit(machine, directory)
    waited = (read_or_none(trains / "schedstat") or "").split()
    if len(waited) == 3:
        row["run_delay_us_total"] = int(waited[1]) // 1000
    try:
        row["open_files"] = len(os.listdir(directory / "fd"))
    except OSError:
        pass  # another user's process: the column stays unknown
    return row


def _limit(machine: Machine, directory: Path) -> dict[str, float | str]:
    """Return the limit of its control group on processor time, and how long that held it up."""
    cpu = processors(machine.cgroups, groups_of(read_or_none(directory / "cgroup") or ""))
    if cpu is None or cpu.throttled_us < 0:
        return {}
    millicores = 0 if cpu.cores is None else round(1000 * cpu.cores)
    return {"throttled_us_total": cpu.throttled_us, "cpu_limit_millicores": millicores}


def _stat(proc: Path, pid: int) -> list[int] | None:
    """Return the numbers of /proc/<pid>/stat; in place of the state, a letter, who stopped it."""
    try:
        text = read(proc / str(pid) / "stat")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    if len(words) <= _RSS or words[0] in "ZX":
        return None
    return [_STOPPED_BY.get(words[0], 0), *(int(word) for word in words[1 : _RSS + 1])]


def _is_frozen(machine: Machine, directory: Path) -> bool:
    """Return whether the control group of a process is frozen, by version 2 or version 1."""
    for line in (read_or_none(directory / "cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if ".." in Path(path).parts:  # above what a container sees
            continue
        if not controllers:
            events = read_or_none(machine.cgroups / path.lstrip("/") / "cgroup.events") or ""
            if dict(pairs(events)).get("frozen"):
                return True
        elif "freezer" in controllers.split(","):
            where = machine.cgroups / "freezer" / path.lstrip("/") / "freezer.state"
            if (read_or_none(where) or "").strip() == "FROZEN":
                return True
    return False
