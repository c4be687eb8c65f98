"""Limits and memory of this process and its cgroup, and what sets the machine's pace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.facts.cgroup import CgroupFacts
from rankscope.preflight.facts.cgroup import collect as collect_cgroup
from rankscope.preflight.system import System

if TYPE_CHECKING:
    from rankscope.preflight.options import Options

UNLIMITED = -1
_LIMIT_LINE = re.compile(r"^(Max .+?)\s{2,}(\S+)\s+(\S+)", re.MULTILINE)
_CAP_IPC_LOCK, _CAP_SYS_RESOURCE = 14, 24  # linux/capability.h


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of this process. None: not known; -1: unlimited."""

    nofile_soft: int | None = None
    nofile_hard: int | None = None
    memlock_soft_bytes: int | None = None
    may_lock_memory: bool | None = None  # CAP_IPC_LOCK: the limit does not bind
    address_soft_bytes: int | None = None  # of memory that may be mapped, used or not
    address_hard_bytes: int | None = None
    nproc_soft: int | None = None
    nproc_binds: bool = True  # not for root, nor with CAP_SYS_RESOURCE
    num_user_tasks: int | None = None  # threads of this user, where nproc_soft is a number
    shm_total_bytes: int | None = None  # /dev/shm
    shm_free_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    num_cores: int | None = None  # by affinity
    cgroup: CgroupFacts = CgroupFacts()
    governor: str = ""  # of cpu0
    huge_pages: str = ""  # transparent: always, madvise, never
    numa_balancing: int | None = None
    num_numa_nodes: int = 0


def collect(system: System, options: Options | None = None) -> LimitFacts:
    """Read /proc, /sys and the size of /dev/shm; a few milliseconds."""
    limits = {
        name: (_number(soft), _number(hard))
        for name, soft, hard in _LIMIT_LINE.findall(system.read("/proc/self/limits") or "")
    }
    status = _fields(system.read("/proc/self/status") or "")
    memory = _fields(system.read("/proc/meminfo") or "")
    capabilities = int(status.get("CapEff", "0"), 16)
    nproc, _ = limits.get("Max processes", (None, None))
    user = status.get("Uid", "").split()[:1]
    counts = nproc is not None and nproc != UNLIMITED and bool(user)
    shm = system.space("/dev/shm")
    total_swap, free_swap = (_kib(memory.get(name)) for name in ("SwapTotal", "SwapFree"))
    return LimitFacts(
        nofile_soft=limits.get("Max open files", (None, None))[0],
        nofile_hard=limits.get("Max open files", (None, None))[1],
        memlock_soft_bytes=limits.get("Max locked memory", (None, None))[0],
        may_lock_memory=bool(capabilities >> _CAP_IPC_LOCK & 1) if "CapEff" in status else None,
        address_soft_bytes=limits.get("Max address space", (None, None))[0],
        address_hard_bytes=limits.get("Max address space", (None, None))[1],
        nproc_soft=nproc,
        nproc_binds=not (user == ["0"] or capabilities >> _CAP_SYS_RESOURCE & 1),
        num_user_tasks=_tasks_of(system, user[0]) if counts else None,
        shm_total_bytes=shm.total_bytes if shm is not None else None,
        shm_free_bytes=shm.free_bytes if shm is not None else None,
        memory_total_bytes=_kib(memory.get("MemTotal")),
        memory_available_bytes=_kib(memory.get("MemAvailable")),
        swap_used_bytes=(
            total_swap - free_swap if total_swap is not None and free_swap is not None else None
        ),
        num_cores=_count(status.get("Cpus_allowed_list", "")),
        cgroup=collect_cgroup(system),
        governor=(
            system.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or ""
        ).strip(),
        huge_pages=_chosen(system.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""),
        numa_balancing=system.read_int("/proc/sys/kernel/numa_balancing"),
        num_numa_nodes=sum(
            bool(re.fullmatch(r"node\d+", name))
            for name in system.names("/sys/devices/system/node")
        ),
    )


def _number(text: str) -> int | None:
    if text == "unlimited":
        return UNLIMITED
    return int(text) if text.isdigit() else None


def _fields(text: str) -> dict[str, str]:
    """Return the fields of a file of "Name:  value" lines."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kib(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[0]) << 10 if words and words[0].isdigit() else None


def _count(ranges: str) -> int | None:
    """Return how many there are in "0-3,8"."""
    total = 0
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        total += int(last or first) - int(first) + 1
    return total or None


def _chosen(text: str) -> str:
    """Return the word in brackets of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match.group(1) if match else ""


def _tasks_of(system: System, user: str) -> int:
    """Return the number of threads of a user: what RLIMIT_NPROC counts."""
    total = 0
    for pid in filter(str.isdigit, system.names("/proc")):
        status = _fields(system.read(f"/proc/{pid}/status") or "")
        if status.get("Uid", "").split()[:1] == [user]:
            total += int(status.get("Threads", "1"))
    return total
