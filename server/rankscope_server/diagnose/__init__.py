"""Detectors: pure functions from what is known of an attempt to findings."""

from __future__ import annotations

from rankscope_server.diagnose import (
    clocks,
    communication,
    crash,
    data,
    desync,
    environment,
    goodput,
    gpu,
    hang,
    links,
    memory,
    numerics,
    parameter_server,
    pipeline,
    regression,
    stalls,
    straggler,
)
from rankscope_server.diagnose.window import Detector

DETECTORS: tuple[Detector, ...] = (  # order = run order
    straggler.Straggler(),
    stalls.Stalls(),
    stalls.StoppedProcess(),
    hang.Hang(),
    desync.Desync(),
    crash.RootCause(),
    clocks.ClockOffsets(),
    links.SlowLink(),
    communication.Communication(),
    pipeline.Pipeline(),
    environment.Drift(),
    numerics.Replicas(),
    numerics.NonFinite(),
    numerics.Spikes(),
    numerics.Learning(),
    numerics.Outliers(),
    data.CorruptBatches(),
    data.Sampling(),
    memory.MemoryGrowth(),
    data.DataLoading(),
    gpu.GpuEvents(),
    gpu.GpuHealth(),
    numerics.StatisticalEfficiency(),
    parameter_server.Staleness(),
    goodput.Goodput(),
    regression.Regression(),
)
