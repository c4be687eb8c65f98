"""Collective smoke test: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.collective.gloo import CollGloo
from rankscope.preflight.checks.collective.nccl import CollNccl
from rankscope.preflight.checks.collective.pair import CollPair
from rankscope.preflight.checks.collective.rdzv import CollRdzv

CHECKS: tuple[Check, ...] = (CollRdzv(), CollGloo(), CollNccl(), CollPair())
