"""Detectors: pure functions from what is known of an attempt to findings."""

from __future__ import annotations

from rankscope_server.detectors.clock_offsets import ClockOffsets
from rankscope_server.detectors.communication import Communication
from rankscope_server.detectors.corrupt_batches import CorruptBatches
from rankscope_server.detectors.data_loading import DataLoading
from rankscope_server.detectors.desync import Desync
from rankscope_server.detectors.drift import Drift
from rankscope_server.detectors.goodput import Goodput
from rankscope_server.detectors.gpu_events import GpuEvents
from rankscope_server.detectors.gpu_health import GpuHealth
from rankscope_server.detectors.hang import Hang
from rankscope_server.detectors.memory_growth import MemoryGrowth
from rankscope_server.detectors.noise_scale import StatisticalEfficiency
from rankscope_server.detectors.nonfinite import NonFinite
from rankscope_server.detectors.outliers import Outliers
from rankscope_server.detectors.pipeline import Pipeline
from rankscope_server.detectors.regression import Regression
from rankscope_server.detectors.replicas import Replicas
from rankscope_server.detectors.root_cause import RootCause
from rankscope_server.detectors.slow_link import SlowLink
from rankscope_server.detectors.spikes import Spikes
from rankscope_server.detectors.staleness import Staleness
from rankscope_server.detectors.stalls import Stalls
from rankscope_server.detectors.stopped_process import StoppedProcess
from rankscope_server.detectors.straggler import Straggler
from rankscope_server.detectors.window import Detector

DETECTORS: tuple[Detector, ...] = (  # order = run order
    Straggler(),
    Stalls(),
    StoppedProcess(),
    Hang(),
    Desync(),
    RootCause(),
    ClockOffsets(),
    SlowLink(),
    Communication(),
    Pipeline(),
    Drift(),
    Replicas(),
    NonFinite(),
    Spikes(),
    Outliers(),
    CorruptBatches(),
    MemoryGrowth(),
    DataLoading(),
    GpuEvents(),
    GpuHealth(),
    StatisticalEfficiency(),
    Staleness(),
    Goodput(),
    Regression(),
)
