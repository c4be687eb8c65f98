"""Answers of the first page of a run."""

from __future__ import annotations

import msgspec

from rankscope_server.answers import Capped, Schema
from rankscope_server.api.findings.schema import ShownVerdict
from rankscope_server.api.runs.schema import LossRow, RunSummary, ShortAnswer
from rankscope_server.api.storage.schema import RemovedRow
from rankscope_server.findings.finding import Severity


class SilentRank(Schema, frozen=True):
    """A rank of which nothing came for a while."""

    rank: int
    last_seen_ms: float | None
    step: int


class Coverage(Schema, frozen=True):
    """How much of the run is seen."""

    expected: int
    registered: int
    reporting: int
    silent: list[SilentRank]
    losses: list[LossRow]
    lost: int  # of all reasons, those that were cut included
    refused: int
    missing_batches: int
    text: str
    notes: list[str] = msgspec.field(default_factory=list)  # recorded in part, or unequally
    losses_capped: Capped | None = None


class ShownAnswer(ShortAnswer, frozen=True):
    """The first sentence of the page, with or without a verdict."""

    detail: str
    deciding: list[str] = msgspec.field(default_factory=list)  # what would decide
    notes: list[str] = msgspec.field(default_factory=list)  # of coverage


class Number(Schema, frozen=True):
    """A key number of the overview."""

    key: str
    label: str
    value: float | None
    unit: str
    change_ratio: float | None = None
    reference_text: str = ""


class Attempt(Schema, frozen=True):
    """One (re)start of a run."""

    attempt: int
    started_ms: float | None
    ended_ms: float | None
    last_seen_ms: float | None
    world_size: int | None
    step_lo: int | None
    step_hi: int | None
    exit_text: str


class Counts(Schema, frozen=True):
    """How many of what there are."""

    findings_open: int
    findings_worst: Severity | None  # of those that are open
    findings_recovered: int
    errors: int
    log_lines: int
    environment_differences: int


class TrackerRun(Schema, frozen=True):
    """A run of an experiment tracker that ranks log to."""

    tracker: str
    title: str
    run: str
    name: str
    project: str
    page: str | None  # an address for browsers; null where it has none
    store: str
    mode: str
    rank: int


class Overview(Schema, frozen=True):
    """The first page of a run."""

    run: RunSummary
    coverage: Coverage
    verdict: ShownVerdict | None
    answer: ShownAnswer
    numbers: list[Number]
    attempts: list[Attempt]
    counts: Counts
    removed: list[RemovedRow]  # by retention
    trackers: list[TrackerRun]
