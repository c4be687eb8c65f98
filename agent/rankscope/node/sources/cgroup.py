"""Limits and use of the control groups that hold the ranks, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.control_groups import Processors, groups_of, processors, upwards
from rankscope.node.sources.files import need, number, pairs, read_or_none, read_whole
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.schema import ChunkKind

_MAX_GROUPS = 16
_TURNS_AFTER = 5  # a group is looked at so long after its last rank is gone
_NO_LIMIT = 1 << 60  # version 1 says "none" with the largest multiple of a page
# what is used, the limit, and what happened
_MEMORY = ("memory.current", "memory.max", "memory.events")
_OLD_MEMORY = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")


class CgroupSource(SampleSource):
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
        groups = groups_of(text)
        name = groups.get("memory") or groups.get("") or "/"
        row: dict[str, float | str] = {"cgroup": name[:1000]}
        row |= self._memory(name, groups)
        row |= self._processor(groups)
        for directory in upwards(self._machine.cgroups, groups, "pids"):
            if (tasks := number(read_or_none(directory / "pids.current"))) >= 0:
                row["tasks"] = tasks
                break
        return row

    def _memory(self, name: str, groups: dict[str, str]) -> Row:
        """Return what the nearest group with a limit says, or the nearest one with numbers."""
        values: dict[str, float | str] = {}
        where: Path | None = None
        for directory in upwards(self._machine.cgroups, groups, "memory"):
            old = (directory / "memory.limit_in_bytes").exists()
            names = _OLD_MEMORY if old else _MEMORY
            bytes_used, limit = (number(read_or_none(directory / name)) for name in names[:2])
            has_limit = 0 <= limit < _NO_LIMIT
            if bytes_used < 0 or (values and not has_limit):
                continue
            limits = [value for value in (limit, self._memory_bytes) if 0 <= value < _NO_LIMIT]
            events = dict(pairs(read_or_none(directory / names[2]) or ""))
            failed = number(read_or_none(directory / "memory.failcnt"))
            values = {
                "memory_bytes": bytes_used,
                "memory_limit_bytes": min(limits, default=-1),
                "memory_limit_hits_total": failed if old else events.get("max", -1),
                "oom_kills_total": events.get("oom_kill", -1),
            }
            where = directory
            if has_limit:
                break
        if where is not None and isinstance(kills := values["oom_kills_total"], int):
            self._report_kills(name, where, kills)
        return values

    def _processor(self, groups: dict[str, str]) -> Row:
        row: dict[str, float | str] = {}
        for directory in upwards(self._machine.cgroups, groups, "cpuacct"):
            if (used := number(read_or_none(directory / "cpuacct.usage"))) >= 0:
                row["cpu_us_total"] = used // 1000
                break
        cpu = processors(self._machine.cgroups, groups)
        if cpu is not None:
            row |= _throttled(cpu)
            limits = [value for value in (cpu.cores, self._num_cpus) if value is not None]
            row["cpu_limit_cores"] = min(limits)
        return row

    def _report_kills(self, name: str, directory: Path, kills: int) -> None:
        before = self._kills.get(directory, kills)
        self._kills[directory] = kills
        if kills > before >= 0:
            fields = {"cgroup": name, "count": str(kills - before), "seen_in": "cgroup"}
            self._machine.report_of("oom kill", fields)


def _throttled(cpu: Processors) -> Row:
    row: dict[str, float | str] = {}
    for name, column in (
        ("usage_usec", "cpu_us_total"),
        ("nr_periods", "periods_total"),
        ("nr_throttled", "throttled_periods_total"),
    ):
        if name in cpu.stat:
            row[column] = cpu.stat[name]
    if cpu.throttled_us >= 0:
        row["throttled_us_total"] = cpu.throttled_us
    return row
