"""Limits from recorded trees of /proc and /sys, control groups of both versions; this machine."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rankscope.preflight.checks.limits import needed_files
from rankscope.preflight.facts import cgroup, limits
from rankscope.preflight.options import Options
from rankscope.preflight.system import Space, System

GIB = 1 << 30
LIMITS_TEXT = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max processes             4096                 8192                 processes
Max address space         unlimited            unlimited            bytes
Max open files            1024                 1048576              files
Max locked memory         67108864             unlimited            bytes
"""
STATUS_TEXT = """\
Name:\tpython
Uid:\t1000\t1000\t1000\t1000
Threads:\t3
CapEff:\t0000000000000000
Cpus_allowed_list:\t0-3,8
"""
MEMINFO_TEXT = """\
MemTotal:       16384 kB
MemAvailable:    8192 kB
SwapTotal:       2048 kB
SwapFree:        1024 kB
"""


@dataclass(frozen=True)
class Recorded(System):
    """A recorded tree, with a /dev/shm of 64 MiB."""

    def space(self, path: str) -> Space | None:
        return Space(64 << 20, 60 << 20)


def tree(root: Path, files: dict[str, str]) -> Recorded:
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Recorded(root=root, environ={})


def test_limits_of_a_recorded_machine(tmp_path: Path) -> None:
    system = tree(tmp_path, {
        "/proc/self/limits": LIMITS_TEXT, "/proc/self/status": STATUS_TEXT,
        "/proc/meminfo": MEMINFO_TEXT, "/proc/11/status": STATUS_TEXT,
        "/proc/12/status": STATUS_TEXT.replace("1000", "0"),
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
        "/sys/devices/system/node/node0/cpulist": "0-3\n",
        "/sys/devices/system/node/online": "0\n",
    })  # fmt: skip
    facts = limits.collect(system, Options())
    assert (facts.nofile_soft, facts.nofile_hard) == (1024, 1048576)
    assert facts.memlock_soft_bytes == 64 << 20
    assert facts.may_lock_memory is False
    assert (facts.address_soft_bytes, facts.address_hard_bytes) == (-1, -1)  # unlimited
    assert (facts.nproc_soft, facts.nproc_binds, facts.num_user_tasks) == (4096, True, 3)
    assert (facts.shm_total_bytes, facts.shm_free_bytes) == (64 << 20, 60 << 20)
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (16 << 20, 8 << 20)
    assert facts.swap_used_bytes == 1 << 20
    assert facts.num_cores == 5
    assert (facts.governor, facts.huge_pages, facts.numa_balancing) == ("powersave", "madvise", 1)
    assert facts.num_numa_nodes == 1


def test_a_machine_that_says_nothing_is_not_healthy(tmp_path: Path) -> None:
    facts = limits.collect(System(root=tmp_path, environ={}), Options())
    assert facts == limits.LimitFacts()
    assert facts.nofile_soft is None


def test_this_machine_says_what_the_kernel_says() -> None:
    facts = limits.collect(System(), Options())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (facts.nofile_soft, facts.nofile_hard) == (soft, hard)
    assert facts.memory_total_bytes == psutil.virtual_memory().total
    assert facts.num_cores == len(psutil.Process().cpu_affinity() or ())


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup"
    system = tree(tmp_path, {
        "/proc/self/cgroup": "0::/job/step\n",
        f"{base}/cgroup.controllers": "cpu memory pids\n",
        f"{base}/job/memory.max": f"{8 * GIB}\n", f"{base}/job/memory.current": f"{7 * GIB}\n",
        f"{base}/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        f"{base}/job/step/memory.max": "max\n", f"{base}/job/step/memory.current": f"{GIB}\n",
        f"{base}/job/cpu.max": "max 100000\n", f"{base}/job/step/cpu.max": "150000 100000\n",
        f"{base}/job/pids.max": "512\n", f"{base}/job/pids.current": "100\n",
    })  # fmt: skip
    assert cgroup.collect(system) == cgroup.CgroupFacts(
        version=2, memory_limit_bytes=8 * GIB, memory_used_bytes=6 * GIB, cpu_cores=1.5,
        pids_max=512, pids_now=100,
    )  # fmt: skip


def test_version_1_in_a_container_sees_only_the_top(tmp_path: Path) -> None:
    base = "/sys/fs/cgroup"
    none = str((1 << 63) - 4096)
    system = tree(tmp_path, {
        "/proc/self/cgroup": "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n2:pids:/docker/a\n",
        f"{base}/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{base}/memory/memory.usage_in_bytes": f"{GIB}\n",
        f"{base}/memory/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\n",
        f"{base}/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        f"{base}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        f"{base}/pids/pids.max": "max\n", f"{base}/pids/pids.current": "3\n",
    })  # fmt: skip
    assert cgroup.collect(system) == cgroup.CgroupFacts(
        version=1, memory_limit_bytes=2 * GIB, memory_used_bytes=GIB // 2, cpu_cores=4.0
    )
    (tmp_path / base[1:] / "memory/memory.limit_in_bytes").write_text(none)
    (tmp_path / base[1:] / "cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup.collect(system) == cgroup.CgroupFacts(version=1)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_the_formula_of_files_covers_what_was_measured(world_size: int) -> None:
    """Of the rank that hosts the store, with three process groups (torch 2.13, gloo)."""
    measured = {2: 33, 3: 37, 4: 41, 6: 49}
    assert measured[world_size] < needed_files(world_size) < measured[world_size] + 100
    assert needed_files(1000) < 65536
