"""Detectors: pure functions from what is known of an attempt to findings."""

from __future__ import annotations

from rankscope_server.diagnose.clocks.offsets import ClockOffsets
from rankscope_server.diagnose.communication.detector import Communication
from rankscope_server.diagnose.crash.detector import RootCause
from rankscope_server.diagnose.data.corrupt_batches import CorruptBatches
from rankscope_server.diagnose.data.loading import DataLoading
from rankscope_server.diagnose.desync.detector import Desync
from rankscope_server.diagnose.environment.drift import Drift
from rankscope_server.diagnose.goodput.detector import Goodput
from rankscope_server.diagnose.gpu.events import GpuEvents
from rankscope_server.diagnose.gpu.health import GpuHealth
from rankscope_server.diagnose.hang.detector import Hang
from rankscope_server.diagnose.links.detector import SlowLink
from rankscope_server.diagnose.memory.growth import MemoryGrowth
from rankscope_server.diagnose.numerics.noise_scale import StatisticalEfficiency
from rankscope_server.diagnose.numerics.nonfinite import NonFinite
from rankscope_server.diagnose.numerics.outliers import Outliers
from rankscope_server.diagnose.numerics.replicas import Replicas
from rankscope_server.diagnose.numerics.spikes import Spikes
from rankscope_server.diagnose.parameter_server.staleness import Staleness
from rankscope_server.diagnose.pipeline.detector import Pipeline
from rankscope_server.diagnose.regression.detector import Regression
from rankscope_server.diagnose.stalls.detector import Stalls
from rankscope_server.diagnose.stalls.stopped_process import StoppedProcess
from rankscope_server.diagnose.straggler.detector import Straggler
from rankscope_server.diagnose.window import Detector

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
