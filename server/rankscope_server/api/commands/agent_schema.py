"""Answers about the agent itself."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Shape
from rankscope_server.api.runs.schema import LossRow

SourceState: TypeAlias = Literal["used", "waits", "skipped", "off", "failed"]


class SourceRow(Shape, frozen=True):
    """What one hook of the agent uses, and in which ranks."""

    hook: str
    state: SourceState
    source: str
    reason: str
    ranks: list[int]
    ranks_text: str


class SourceChange(Shape, frozen=True):
    """One rank began to record less of its collectives, or more, and why."""

    time_ms: float
    rank: int
    step: int
    old: str
    new: str
    why: str
    overhead_ratio: float | None
    budget_ratio: float | None


class AgentAnswer(Shape, frozen=True):
    """What the agent of a run says of itself."""

    text: str
    num_ranks: int
    off: list[int]  # ranks that record nothing
    alone: list[int]  # ranks whose collectives are not matched with those of their peers
    sources: list[SourceRow]
    changes: list[SourceChange]
    losses: list[LossRow]
    is_live: bool
