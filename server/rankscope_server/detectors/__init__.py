"""Detectors: pure functions from what is known of an attempt to findings."""

from __future__ import annotations

from rankscope_server.detectors.straggler import Straggler
from rankscope_server.detectors.window import Detector

DETECTORS: tuple[Detector, ...] = (Straggler(),)  # order = run order
