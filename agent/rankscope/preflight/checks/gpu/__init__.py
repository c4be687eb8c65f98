"""GPUs: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.gpu.burn import GpuBurn
from rankscope.preflight.checks.gpu.busy import GpuBusy
from rankscope.preflight.checks.gpu.clock import GpuClock
from rankscope.preflight.checks.gpu.count import GpuCount
from rankscope.preflight.checks.gpu.ecc import GpuEcc
from rankscope.preflight.checks.gpu.nvlink import GpuNvlink
from rankscope.preflight.checks.gpu.p2p import GpuP2p
from rankscope.preflight.checks.gpu.pcie import GpuPcie
from rankscope.preflight.checks.gpu.recovery import GpuRecovery

CHECKS: tuple[Check, ...] = (
    GpuCount(),
    GpuBusy(),
    GpuEcc(),
    GpuRecovery(),
    GpuClock(),
    GpuPcie(),
    GpuNvlink(),
    GpuP2p(),
    GpuBurn(),
)
