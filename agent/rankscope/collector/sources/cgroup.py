"""Limits and use of the control groups that hold the ranks, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from rankscope.collector.sources.base import Lane, Row, Skipped, Source
from rankscope.collector.sources.files import need, number, pairs, read_or_none, read_whole
from rankscope.collector.sources.machine import Machine
from rankscope.schema import ChunkKind

_MAX_GROUPS = 16
_TURNS_AFTER = 5  # a group is looked at so long after its last rank is gone
_NO_LIMIT = 1 << 60  # version 1 says "none" with the largest multiple of a page
# what is used, the limit, and what happened
_MEMORY = ("memory.current", "memory.max", "memory.events")
_OLD_MEMORY = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")


class CgroupSource(Source):
    """Memory and processor limits of the ranks' control groups, what is used, what was denied."""

    name: ClassVar[str] = "cgroup"
    kind: ClassVar[ChunkKind | None] = "cgroup"
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._memory_bytes = -1
        self._num_cpus = -1
        self._kills: dict[Path, int] = {}
        self._turns_left: dict[str, int] = {}  # of /proc/<pid>/cgroup, also of ranks just gone

    def open(self) -> None:
        """Read what the machine has. Raises Skipped where no control group is mounted."""
        need(self._machine.proc / "self/cgroup", "the kernel has no control groups")
        memory = dict(pairs(read_or_none(self._machine.proc / "meminfo") or ""))
        self._memory_bytes = memory["MemTotal"] << 10 if "MemTotal" in memory else -1
        lines = read_whole(self._machine.proc / "stat").splitlines()
        self._num_cpus = sum(line.startswith("cpu") for line in lines) - 1
        if not any(len(row) > 1 for row in self.sample()):
            raise Skipped(f"nothing below {self._machine.cgroups} can be read")

    def sample(self) -> Iterable[Row]:
        """Return one row for each control group that holds a rank, or for the collector's own."""
        ranks = self._machine.ranks()
        files = [self._machine.proc / str(rank.pid) / "cgroup" for rank in ranks]
        texts = dict.fromkeys(filter(None, map(read_or_none, files)))
        if not texts and (text := read_or_none(self._machine.proc / "self/cgroup")):
            texts[text] = None
        # a rank that was killed for memory is gone before its group is asked again
        left = {text: turns - 1 for text, turns in self._turns_left.items() if turns > 1}
        self._turns_left = left | dict.fromkeys(list(texts)[:_MAX_GROUPS], _TURNS_AFTER)
        return [self._row(text) for text in self._turns_left]

    def _row(self, text: str) -> Row:
        groups: dict[str, str] = {}  # controller -> path; "" is version 2
        for line in text.splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            groups |= dict.fromkeys(controllers.split(","), path)
        name = groups.get("memory") or groups.get("") or "/"
        row: dict[str, float | str] = {"cgroup": name[:1000]}
        row |= self._memory(name, groups)
        row |= self._processor(groups)
        for directory in self._upwards(groups, "pids"):
            if (tasks := number(read_or_none(directory / "pids.current"))) >= 0:
                row["tasks"] = tasks
                break
        return row

    def _memory(self, name: str, groups: dict[str, str]) -> Row:
        """Return what the nearest group with a limit says, or the nearest one with numbers."""
        found: dict[str, float | str] = {}
        where: Path | None = None
        for directory in self._upwards(groups, "memory"):
            old = (directory / "memory.limit_in_bytes").exists()
            names = _OLD_MEMORY if old else _MEMORY
            bytes_used, limit = (number(read_or_none(directory / name)) for name in names[:2])
            has_limit = 0 <= limit < _NO_LIMIT
            if bytes_used < 0 or (found and not has_limit):
                continue
            limits = [value for value in (limit, self._memory_bytes) if 0 <= value < _NO_LIMIT]
            events = dict(pairs(read_or_none(directory / names[2]) or ""))
            failed = number(read_or_none(directory / "memory.failcnt"))
            found = {
                "memory_bytes": bytes_used,
                "memory_limit_bytes": min(limits, default=-1),
                "memory_limit_hits_total": failed if old else events.get("max", -1),
                "oom_kills_total": events.get("oom_kill", -1),
            }
            where = directory
            if has_limit:
                break
        if where is not None and isinstance(kills := found["oom_kills_total"], int):
            self._tell_kills(name, where, kills)
        return found

    def _processor(self, groups: dict[str, str]) -> Row:
        row: dict[str, float | str] = {}
        for directory in self._upwards(groups, "cpuacct"):
            if (used := number(read_or_none(directory / "cpuacct.usage"))) >= 0:
                row["cpu_us_total"] = used // 1000
                break
        for directory in self._upwards(groups, "cpu"):
            stat = dict(pairs(read_or_none(directory / "cpu.stat") or ""))
            cores = _cores(directory)
            if not stat or (row.get("cpu_limit_cores") and cores is None):
                continue
            row |= _throttled(stat)
            limits = [value for value in (cores, self._num_cpus) if value is not None]
            row["cpu_limit_cores"] = min(limits)
            if cores is not None:
                break
        return row

    def _upwards(self, groups: dict[str, str], controller: str) -> Iterator[Path]:
        """Yield the group's directory and its parents. In a container the top is what is seen."""
        old = controller in groups
        path = groups.get(controller, groups.get(""))
        if path is None:
            return
        roots = (
            (self._machine.cgroups / controller,)
            if old
            else (self._machine.cgroups, self._machine.cgroups / "unified")
        )
        for root in roots:
            directory = root / path.lstrip("/")
            if ".." in Path(path).parts or not directory.is_dir():
                directory = root
            while directory != root:
                yield directory
                directory = directory.parent
            yield root

    def _tell_kills(self, name: str, directory: Path, kills: int) -> None:
        before = self._kills.get(directory, kills)
        self._kills[directory] = kills
        if kills > before >= 0:
            fields = {"cgroup": name, "count": str(kills - before), "seen_in": "cgroup"}
            self._machine.tell_of("oom kill", fields)


def _cores(directory: Path) -> float | None:
    """Return the limit of this group in processors, None where it has none."""
    words = (read_or_none(directory / "cpu.max") or "").split()  # "50000 100000", "max 100000"
    if not words:
        words = [
            read_or_none(directory / "cpu.cfs_quota_us") or "",
            read_or_none(directory / "cpu.cfs_period_us") or "",
        ]
    quota, period = (number(word) for word in (*words, "")[:2])
    return quota / period if quota > 0 and period > 0 else None


def _throttled(stat: dict[str, int]) -> Row:
    row: dict[str, float | str] = {}
    for name, column in (
        ("usage_usec", "cpu_us_total"),
        ("nr_periods", "periods_total"),
        ("nr_throttled", "throttled_periods_total"),
        ("throttled_usec", "throttled_us_total"),
    ):
        if name in stat:
            row[column] = stat[name]
    if "throttled_time" in stat:  # version 1, nanoseconds
        row["throttled_us_total"] = stat["throttled_time"] // 1000
    return row
