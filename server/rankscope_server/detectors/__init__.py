"""Detectors: pure functions from what is known of an attempt to findings."""

from __future__ import annotations

from rankscope_server.detectors.clock_offsets import ClockOffsets
from rankscope_server.detectors.communication import Communication
from rankscope_server.detectors.desync import Desync
from rankscope_server.detectors.hang import Hang
from rankscope_server.detectors.pipeline import Pipeline
from rankscope_server.detectors.root_cause import RootCause
from rankscope_server.detectors.straggler import Straggler
from rankscope_server.detectors.window import Detector

DETECTORS: tuple[Detector, ...] = (
    Straggler(),
    Hang(),
    Desync(),
    RootCause(),
    ClockOffsets(),
    Communication(),
    Pipeline(),
)  # order = run order
