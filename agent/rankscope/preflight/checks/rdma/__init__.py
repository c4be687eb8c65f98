"""RDMA: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.rdma.gid import IbGid
from rankscope.preflight.checks.rdma.port import IbPort
from rankscope.preflight.checks.rdma.user import IbUser

CHECKS: tuple[Check, ...] = (IbPort(), IbGid(), IbUser())
