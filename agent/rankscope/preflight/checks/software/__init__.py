"""Software: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.software.backend import SwBackend
from rankscope.preflight.checks.software.container import SwContainer
from rankscope.preflight.checks.software.data import SwData
from rankscope.preflight.checks.software.drift import SwDrift
from rankscope.preflight.checks.software.driver import SwDriver
from rankscope.preflight.checks.software.nccl_multi import SwNcclMulti
from rankscope.preflight.checks.software.script import SwScript

CHECKS: tuple[Check, ...] = (
    SwDrift(),
    SwScript(),
    SwData(),
    SwNcclMulti(),
    SwDriver(),
    SwContainer(),
    SwBackend(),
)
