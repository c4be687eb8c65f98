"""Interfaces and routes: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.interfaces.dup_ip import NetDupIp
from rankscope.preflight.checks.interfaces.gloo import NetIfaceGloo
from rankscope.preflight.checks.interfaces.missing import NetIfaceMissing
from rankscope.preflight.checks.interfaces.nccl import NetIfaceNccl
from rankscope.preflight.checks.interfaces.neigh import NetNeigh
from rankscope.preflight.checks.interfaces.nic import NetNic
from rankscope.preflight.checks.interfaces.route_sym import NetRouteSym
from rankscope.preflight.checks.interfaces.rp_filter import NetRpFilter
from rankscope.preflight.checks.interfaces.subnet import NetSubnet
from rankscope.preflight.checks.interfaces.virtual import NetIfaceVirtual

CHECKS: tuple[Check, ...] = (
    NetIfaceGloo(),
    NetIfaceNccl(),
    NetIfaceMissing(),
    NetIfaceVirtual(),
    NetSubnet(),
    NetDupIp(),
    NetRouteSym(),
    NetRpFilter(),
    NetNic(),
    NetNeigh(),
)
