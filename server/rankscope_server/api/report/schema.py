"""A run on paper: what `rankscope report` shows, writes and packs."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rankscope_server.answers import Capped, Schema
from rankscope_server.api.findings.schema import Detector, ShownFinding, ShownVerdict
from rankscope_server.api.logs.schema import LogRow
from rankscope_server.api.overview.schema import Attempt, Coverage, Number, ShownAnswer
from rankscope_server.api.ranks.schema import ErrorGroup, RankRow
from rankscope_server.api.runs.schema import EnvironmentAnswer, RunSummary
from rankscope_server.api.steps.schema import Budget

REPORT_FORMAT = 1

SummaryKey: TypeAlias = Literal[
    "what", "why", "cost", "next", "command", "sure", "wrong_if", "ruled_out", "explains"
]


class SummaryRow(Schema, frozen=True):
    """One line of the first screen."""

    key: SummaryKey
    label: str
    text: str


class Report(Schema, frozen=True):
    """One run, verdict first. `source` says where it was read."""

    format: int
    made_ms: float
    made_by: str
    source: str
    run: RunSummary
    summary: list[SummaryRow]
    verdict: ShownVerdict | None
    answer: ShownAnswer
    numbers: list[Number]
    findings: list[
        ShownFinding
    ]  # the verdict first, open ones by severity and cost, then what is over
    detectors: list[Detector]
    coverage: Coverage
    not_measured: list[str]
    budget: Budget
    attempts: list[Attempt]
    ranks: list[RankRow]
    errors: list[ErrorGroup]
    environment: EnvironmentAnswer
    lines: list[LogRow]  # the last ones, oldest first
    notes: list[str] = msgspec.field(default_factory=list)  # what could not be read
    ranks_capped: Capped | None = None
    lines_capped: Capped | None = None
