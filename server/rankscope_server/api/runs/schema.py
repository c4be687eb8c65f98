"""Answers about runs, findings and environments."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Schema
from rankscope_server.store.tables import DEFAULT_PROJECT

AnswerState: TypeAlias = Literal["culprit", "advice", "healthy", "waiting", "unknown"]
RunStatus: TypeAlias = Literal["starting", "running", "stuck", "ended", "failed", "silent"]


class ShortVerdict(Schema, frozen=True):
    """The verdict in a list of runs."""

    kind: str
    severity: str
    what: str
    cost_throughput_ratio: float | None = None


class ShortAnswer(Schema, frozen=True):
    """The first sentence about a run, in a list of runs."""

    state: AnswerState
    text: str


class RunSummary(Schema, frozen=True):
    """One run in a list."""

    run_id: str
    name: str
    status: RunStatus
    status_text: str
    started_ms: float | None
    ended_ms: float | None
    last_seen_ms: float | None
    world_size: int | None
    num_nodes: int | None
    hosts: list[str]
    attempt: int
    step: int
    command: list[str]
    launcher: str
    tags: dict[str, str]
    verdict: ShortVerdict | None
    answer: ShortAnswer  # with or without a verdict
    project: str = DEFAULT_PROJECT


class Runs(Schema, frozen=True):
    """A page of runs, newest first."""

    total: int
    runs: list[RunSummary]


class LossRow(Schema, frozen=True):
    """What an agent lost."""

    host: str
    rank: int
    source: str
    reason: str
    count: int


class FactValue(Schema, frozen=True):
    """One value of a fact and the ranks that have it."""

    value: str
    ranks: list[int]


class FactDifference(Schema, frozen=True):
    """A fact on which ranks differ."""

    fact: str
    severity: Literal["critical", "warning", "info"]
    values: list[FactValue]


class Fact(Schema, frozen=True):
    """A fact on which all ranks agree."""

    fact: str
    value: str


class EnvironmentAnswer(Schema, frozen=True):
    """What differs between the ranks' environments, and what they share."""

    text: str
    ranks: list[int]
    missing: list[int]
    differences: list[FactDifference]
    not_known: list[FactDifference]  # one value where it is known, and ranks that do not know it
    common: list[Fact]
