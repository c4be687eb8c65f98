"""Path quality: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.paths.bandwidth import NetBandwidth
from rankscope.preflight.checks.paths.idle import NetIdle
from rankscope.preflight.checks.paths.jitter import NetJitter
from rankscope.preflight.checks.paths.latency import NetLatency
from rankscope.preflight.checks.paths.loss import NetLoss
from rankscope.preflight.checks.paths.mtu_differs import NetMtuDiffers
from rankscope.preflight.checks.paths.mtu_path import NetMtuPath

CHECKS: tuple[Check, ...] = (
    NetMtuPath(),
    NetMtuDiffers(),
    NetLatency(),
    NetJitter(),
    NetLoss(),
    NetBandwidth(),
    NetIdle(),
)
