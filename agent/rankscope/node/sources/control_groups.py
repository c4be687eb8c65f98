"""The control groups of a process, version 1 and 2, and the limit on its processor time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankscope.node.sources.files import number, pairs, read_or_none


class Processors(NamedTuple):
    """The nearest group that says something of processors."""

    cores: float | None  # its limit; None: it has none
    stat: dict[str, int]  # its cpu.stat

    @property
    def throttled_us(self) -> int:
        """For how long it was not let run, as its time was used up, ever; -1 not known."""
        if "throttled_time" in self.stat:  # version 1, nanoseconds
            return self.stat["throttled_time"] // 1000
        return self.stat.get("throttled_usec", -1)


def groups_of(text: str) -> dict[str, str]:
    """Return the paths by controller from /proc/<pid>/cgroup; "" is version 2."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def upwards(root_of_all: Path, groups: dict[str, str], controller: str) -> Iterator[Path]:
    """Yield the group's directory and its parents. In a container the top is what is seen."""
    old = controller in groups
    path = groups.get(controller, groups.get(""))
    if path is None:
        return
    roots = (root_of_all / controller,) if old else (root_of_all, root_of_all / "unified")
    for root in roots:
        directory = root / path.lstrip("/")
        if ".." in Path(path).parts or not directory.is_dir():
            directory = root
        while directory != root:
            yield directory
            directory = directory.parent
        yield root


def processors(root_of_all: Path, groups: dict[str, str]) -> Processors | None:
    """Return what the nearest group with a limit says, else the nearest one with numbers."""
    found: Processors | None = None
    for directory in upwards(root_of_all, groups, "cpu"):
        stat = dict(pairs(read_or_none(directory / "cpu.stat") or ""))
        cores = _cores(directory)
        if not stat or (found is not None and cores is None):
            continue
        found = Processors(cores, stat)
        if cores is not None:
            break
    return found


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
