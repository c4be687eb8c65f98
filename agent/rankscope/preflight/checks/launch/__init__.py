"""Presence and the launch environment: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.launch.absent import NodeAbsent
from rankscope.preflight.checks.launch.agree import EnvAgree
from rankscope.preflight.checks.launch.complete import EnvComplete
from rankscope.preflight.checks.launch.drift import EnvDrift
from rankscope.preflight.checks.launch.local import EnvEndpointLocal
from rankscope.preflight.checks.launch.omp import EnvOmp
from rankscope.preflight.checks.launch.rank_unique import EnvRankUnique
from rankscope.preflight.checks.launch.slow_left import EnvSlowLeft
from rankscope.preflight.checks.launch.unknown import EnvUnknown

CHECKS: tuple[Check, ...] = (
    NodeAbsent(),
    EnvComplete(),
    EnvAgree(),
    EnvRankUnique(),
    EnvEndpointLocal(),
    EnvDrift(),
    EnvUnknown(),
    EnvSlowLeft(),
    EnvOmp(),
)
