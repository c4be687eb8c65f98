"""Presence and launch environment: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checking import Check
from rankscope.preflight.checks.launch.absent import NodeAbsent

CHECKS: tuple[Check, ...] = (NodeAbsent(),)
