"""Clocks: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.clock.offset import ClockOffset
from rankscope.preflight.checks.clock.sync import ClockSync

CHECKS: tuple[Check, ...] = (
    ClockOffset(),
    ClockSync(),
)
