"""Ports: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.ports.conntrack import PortConntrack
from rankscope.preflight.checks.ports.count import PortCount
from rankscope.preflight.checks.ports.ephemeral import PortEphemeral
from rankscope.preflight.checks.ports.leftover import ProcLeftover
from rankscope.preflight.checks.ports.master_free import PortMasterFree
from rankscope.preflight.checks.ports.master_identity import PortMasterIdentity
from rankscope.preflight.checks.ports.master_range import PortMasterRange
from rankscope.preflight.checks.ports.master_reach import PortMasterReach
from rankscope.preflight.checks.ports.oneway import PortOneway

CHECKS: tuple[Check, ...] = (
    PortMasterFree(),
    PortMasterReach(),
    PortMasterIdentity(),
    PortMasterRange(),
    PortEphemeral(),
    PortOneway(),
    PortCount(),
    PortConntrack(),
    ProcLeftover(),
)
