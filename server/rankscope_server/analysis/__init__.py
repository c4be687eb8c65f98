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
from rankscope_server.analysis.budget import Budget, BudgetRow, budget
from rankscope_server.analysis.reference import Ratios, ratios
from rankscope_server.analysis.state import RunState
from rankscope_server.detectors.finding import DetectorStatus, Evidence, Finding

__all__ = [
    "Answer",
    "Budget",
    "BudgetRow",
    "Coverage",
    "DetectorStatus",
    "Evidence",
    "Finding",
    "Folded",
    "Look",
    "LossRow",
    "Ratios",
    "RunState",
    "SilentRank",
    "Verdict",
    "budget",
    "ratios",
]
