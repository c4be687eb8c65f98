"""Limits of the control group that holds this process, version 1 and 2, through all its parents."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rankscope.preflight.system import System

_NO_LIMIT = 1 << 60  # version 1 says "none" with the largest multiple of a page


class CgroupFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tightest limit on the way up. None: no limit, or not known."""

    version: int = 0  # 1 or 2, of the memory controller; 0: no control groups
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None  # of that group, less what can be dropped
    cpu_cores: float | None = None
    pids_max: int | None = None
    pids_now: int | None = None  # of the group with that limit


def collect(system: System) -> CgroupFacts:
    """Read the groups that /proc/self/cgroup names."""
    paths: dict[str, str] = {}
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)
    if not paths:
        return CgroupFacts()
    limit, used = _memory(system, paths)
    tasks_max, tasks = _pids(system, paths)
    return CgroupFacts(
        version=1 if "memory" in paths else 2,
        memory_limit_bytes=limit,
        memory_used_bytes=used,
        cpu_cores=_cores(system, paths),
        pids_max=tasks_max,
        pids_now=tasks,
    )


def _memory(system: System, paths: dict[str, str]) -> tuple[int | None, int | None]:
    """Return limit and use of the group with the least room."""
    found: list[tuple[int, int, int]] = []
    for folder in _upwards(system, paths, "memory"):
        limit = _first(system, folder, "memory.max", "memory.limit_in_bytes")
        used = _first(system, folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        # file pages that were not used lately are given back before anything is killed
        stat = dict(
            line.split()[:2]
            for line in (system.read(f"{folder}/memory.stat") or "").splitlines()
            if len(line.split()) == 2
        )
        text = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
        held = max(used - int(text), 0) if text.isdigit() else used
        found.append((limit - held, limit, held))
    if not found:
        return None, None
    _, limit, held = min(found)
    return limit, held


def _cores(system: System, paths: dict[str, str]) -> float | None:
    found = []
    for folder in _upwards(system, paths, "cpu"):
        words = (system.read(f"{folder}/cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            found.append(int(words[0]) / int(words[1]))
        quota = system.read_int(f"{folder}/cpu.cfs_quota_us")
        period = system.read_int(f"{folder}/cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def _pids(system: System, paths: dict[str, str]) -> tuple[int | None, int | None]:
    found = []
    for folder in _upwards(system, paths, "pids"):
        limit, now = (system.read_int(f"{folder}/pids.{name}") for name in ("max", "current"))
        if limit is not None and now is not None:
            found.append((limit - now, limit, now))
    if not found:
        return None, None
    _, limit, now = min(found)
    return limit, now


def _upwards(system: System, paths: dict[str, str], controller: str) -> Iterator[str]:
    """Yield the group's directory and its parents; in a container the top is what is seen."""
    if controller in paths:
        path, bases = paths[controller], [f"/sys/fs/cgroup/{controller}"]
        # co-mounted controllers share one directory, named after both
        bases += [f"/sys/fs/cgroup/{name}" for name in ("cpu,cpuacct",) if controller == "cpu"]
    else:
        path, bases = paths.get("", "/"), ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
    base = next((folder for folder in bases if system.names(folder)), "")
    if not base:
        return
    parts = [] if ".." in path else [part for part in path.split("/") if part]
    for length in range(len(parts), -1, -1):
        folder = "/".join([base, *parts[:length]])
        if system.names(folder):
            yield folder


def _first(system: System, folder: str, *names: str) -> int | None:
    for name in names:
        value = system.read_int(f"{folder}/{name}")
        if value is not None:
            return value
    return None
