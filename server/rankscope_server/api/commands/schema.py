"""Answers about what was asked of the agent."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope.wire.schema import CommandKind
from rankscope_server.answers import Capped, Schema
from rankscope_server.api.runs.schema import LossRow

CommandState: TypeAlias = Literal["pending", "sent", "running", "done", "refused", "expired"]


class OperatorRow(Schema, frozen=True):
    """One operator, kernel or range of a trace; self time is without what it called."""

    name: str
    category: str
    count: int
    total_ms: float
    self_ms: float | None


class CommandRank(Schema, frozen=True):
    """What became of a command in one rank."""

    rank: int
    state: CommandState
    reason: str
    updated_ms: float | None
    trace_bytes: int | None
    trace: str | None  # address of the trace, relative to the dashboard's root
    operators: list[OperatorRow]


class CommandRow(Schema, frozen=True):
    """What was asked of ranks, by whom, and what became of it."""

    id: int
    kind: CommandKind
    attempt: int
    asked_by: str
    finding_id: int | None
    created_ms: float
    expires_ms: float
    num_steps: int | None
    at_step: int | None
    is_open: bool
    text: str
    ranks: list[CommandRank]


class Commands(Schema, frozen=True):
    """The commands of a run, newest first."""

    commands: list[CommandRow]
    capped: Capped | None = None


class PartAnswer(Schema, frozen=True):
    """How much of a trace is there."""

    received_bytes: int


SourceState: TypeAlias = Literal["used", "waits", "skipped", "off", "failed"]


class SourceRow(Schema, frozen=True):
    """What one hook of the agent uses, and in which ranks."""

    hook: str
    state: SourceState
    source: str
    reason: str
    ranks: list[int]
    ranks_text: str


class SourceChange(Schema, frozen=True):
    """One rank began to record less of its collectives, or more, and why."""

    time_ms: float
    rank: int
    step: int
    old: str
    new: str
    why: str
    overhead_ratio: float | None
    budget_ratio: float | None


class AgentAnswer(Schema, frozen=True):
    """What the agent of a run reports of itself."""

    text: str
    num_ranks: int
    off: list[int]  # ranks that record nothing
    alone: list[int]  # ranks whose collectives are not matched with those of their peers
    sources: list[SourceRow]
    changes: list[SourceChange]
    losses: list[LossRow]
    is_live: bool
    losses_capped: Capped | None = None
    changes_capped: Capped | None = None
