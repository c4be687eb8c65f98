"""Answers about what was asked of the agent."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope.wire.schema import CommandKind
from rankscope_server.answers import Capped, Shape

CommandState: TypeAlias = Literal["pending", "sent", "running", "done", "refused", "expired"]


class OperatorRow(Shape, frozen=True):
    """One operator, kernel or range of a trace; self time is without what it called."""

    name: str
    category: str
    count: int
    total_ms: float
    self_ms: float | None


class CommandRank(Shape, frozen=True):
    """What became of a command in one rank."""

    rank: int
    state: CommandState
    reason: str
    updated_ms: float | None
    trace_bytes: int | None
    trace: str | None  # address of the trace, relative to the dashboard's root
    operators: list[OperatorRow]


class CommandRow(Shape, frozen=True):
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


class Commands(Shape, frozen=True):
    """The commands of a run, newest first."""

    commands: list[CommandRow]
    capped: Capped | None = None


class PartAnswer(Shape, frozen=True):
    """How much of a trace is there."""

    received_bytes: int
