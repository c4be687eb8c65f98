"""Limits and memory: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checking import Check

CHECKS: tuple[Check, ...] = ()
