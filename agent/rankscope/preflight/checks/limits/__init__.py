"""Limits and memory: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.limits.cgroup_cpu import LimCgroupCpu
from rankscope.preflight.checks.limits.cgroup_mem import LimCgroupMem
from rankscope.preflight.checks.limits.memlock import LimMemlock
from rankscope.preflight.checks.limits.nofile import LimNofile
from rankscope.preflight.checks.limits.nproc import LimNproc
from rankscope.preflight.checks.limits.perf import SysPerf
from rankscope.preflight.checks.limits.shm import LimShm

CHECKS: tuple[Check, ...] = (
    LimNofile(),
    LimMemlock(),
    LimNproc(),
    LimShm(),
    LimCgroupMem(),
    LimCgroupCpu(),
    SysPerf(),
)
