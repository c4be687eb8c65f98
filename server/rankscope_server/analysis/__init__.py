"""From events to answers: per-run state, verdict, budget and reference. Pure, without a store."""

from rankscope_server.analysis.answers import (
    Answer,
    Coverage,
    Folded,
    Look,
    LossRow,
    SilentRank,
    Verdict,
)
from rankscope_server.analysis.state import RunState
from rankscope_server.detectors.finding import DetectorStatus, Evidence, Finding

__all__ = [
    "Answer",
    "Coverage",
    "DetectorStatus",
    "Evidence",
    "Finding",
    "Folded",
    "Look",
    "LossRow",
    "RunState",
    "SilentRank",
    "Verdict",
]
