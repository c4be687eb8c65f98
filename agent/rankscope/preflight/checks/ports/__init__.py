"""Ports: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checking import Check
from rankscope.preflight.checks.ports.conntrack import PortConntrack
from rankscope.preflight.checks.ports.count import PortCount
from rankscope.preflight.checks.ports.leftover import ProcLeftover
from rankscope.preflight.checks.ports.master_free import PortMasterFree
from rankscope.preflight.checks.ports.master_range import PortMasterRange

CHECKS: tuple[Check, ...] = (
    PortMasterFree(),
    PortMasterRange(),
    PortCount(),
    PortConntrack(),
    ProcLeftover(),
)
