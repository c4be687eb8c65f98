"""All checks, family by family, in run order: this tuple is the catalogue."""

from __future__ import annotations

from rankscope.preflight.checks import (
    clock,
    collective,
    gpu,
    interfaces,
    launch,
    limits,
    names,
    paths,
    ports,
    rdma,
    software,
    storage,
)
from rankscope.preflight.checks.base import Check

FAMILIES: dict[str, tuple[Check, ...]] = {
    "launch": launch.CHECKS,
    "names": names.CHECKS,
    "interfaces": interfaces.CHECKS,
    "ports": ports.CHECKS,
    "paths": paths.CHECKS,
    "clock": clock.CHECKS,
    "limits": limits.CHECKS,
    "storage": storage.CHECKS,
    "software": software.CHECKS,
    "gpu": gpu.CHECKS,
    "rdma": rdma.CHECKS,
    "collective": collective.CHECKS,
}
CHECKS: tuple[Check, ...] = tuple(check for checks in FAMILIES.values() for check in checks)
