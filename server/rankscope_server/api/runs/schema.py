"""Answers about runs, findings and environments."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rankscope_server.answers import Shape
from rankscope_server.api.commands.schema import CommandRow

RunStatus: TypeAlias = Literal["starting", "running", "stuck", "ended", "failed", "silent"]
AnswerState: TypeAlias = Literal["culprit", "healthy", "waiting", "unknown"]


class ShortVerdict(Shape, frozen=True):
    """The verdict in a list of runs."""

    kind: str
    severity: str
    what: str
    cost_throughput_ratio: float | None = None


class RunSummary(Shape, frozen=True):
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


class Runs(Shape, frozen=True):
    """A page of runs, newest first."""

    total: int
    runs: list[RunSummary]


class SilentRank(Shape, frozen=True):
    """A rank that said nothing for a while."""

    rank: int
    last_seen_ms: float | None
    step: int


class LossRow(Shape, frozen=True):
    """What an agent lost."""

    host: str
    rank: int
    source: str
    reason: str
    count: int


class Coverage(Shape, frozen=True):
    """How much of the run is seen."""

    expected: int
    registered: int
    reporting: int
    silent: list[SilentRank]
    losses: list[LossRow]
    refused: int
    missing_batches: int
    text: str
    notes: list[str] = msgspec.field(default_factory=list)  # recorded in part, or unequally


class Answer(Shape, frozen=True):
    """The first sentence of the page, with or without a verdict."""

    state: AnswerState
    text: str
    detail: str
    deciding: list[str] = msgspec.field(default_factory=list)  # what would decide
    notes: list[str] = msgspec.field(default_factory=list)  # of coverage


class Evidence(Shape, frozen=True):
    """One fact behind a finding; `link` is relative to the dashboard's root."""

    text: str
    link: str = ""


class Folded(Shape, frozen=True):
    """A finding that the verdict explains."""

    id: int | None
    what: str


class Finding(Shape, frozen=True):
    """What a detector found: who, since when, why, at what cost, what to do."""

    id: int
    detector: str
    kind: str
    severity: str
    state: str
    attempt: int
    ranks: list[int] = msgspec.field(default_factory=list)
    hosts: list[str] = msgspec.field(default_factory=list)
    group: str | None = None
    onset_step: int | None = None
    onset_ms: float | None = None
    ended_step: int | None = None
    cost_throughput_ratio: float | None = None
    cost_rank_hours_per_day: float | None = None
    confidence: float | None = None
    confidence_text: str = ""
    what: str = ""
    why: str = ""
    next: str = ""
    next_command: str = ""
    evidence: list[Evidence] = msgspec.field(default_factory=list)
    ruled_out: list[str] = msgspec.field(default_factory=list)
    would_be_wrong_if: str = ""
    explained_by: int | None = None
    victims: list[int] = msgspec.field(default_factory=list)
    opened_ms: float | None = None
    updated_ms: float | None = None
    recovered_ms: float | None = None
    policy_hash: str = ""


class Verdict(Finding, frozen=True):
    """The finding that explains the run best, with those folded under it."""

    folded: list[Folded] = msgspec.field(default_factory=list)
    deciding: list[str] = msgspec.field(default_factory=list)  # what would make it sure


class HistoryEvent(Shape, frozen=True):
    """Something that happened to a finding."""

    time_ms: float
    event: str
    text: str


class FindingStack(Shape, frozen=True):
    """Python stacks of one rank that a finding names."""

    rank: int
    time_ms: float
    reason: str
    text: str


class FindingDetail(Finding, frozen=True):
    """A finding with its history, and the stacks of the ranks it names."""

    history: list[HistoryEvent] = msgspec.field(default_factory=list)
    stacks: list[FindingStack] = msgspec.field(default_factory=list)  # of a hang
    commands: list[CommandRow] = msgspec.field(default_factory=list)  # what it asked for


class Detector(Shape, frozen=True):
    """Whether a detector could look."""

    name: str
    text: str = ""
    state: str = ""
    reason: str = ""
    remedy: str = ""


class Findings(Shape, frozen=True):
    """Every finding of a run, and what looked for them."""

    open: list[Finding]
    recovered: list[Finding]
    detectors: list[Detector]
    steps: int


class Number(Shape, frozen=True):
    """A key number of the overview."""

    key: str
    label: str
    value: float | None
    unit: str
    change_ratio: float | None = None
    reference_text: str = ""


class Attempt(Shape, frozen=True):
    """One (re)start of a run."""

    attempt: int
    started_ms: float | None
    ended_ms: float | None
    last_seen_ms: float | None
    world_size: int | None
    step_lo: int | None
    step_hi: int | None
    exit_text: str


class Counts(Shape, frozen=True):
    """How many of what there are."""

    findings_open: int
    findings_recovered: int
    errors: int
    log_lines: int
    environment_differences: int


class Overview(Shape, frozen=True):
    """The first page of a run."""

    run: RunSummary
    coverage: Coverage
    verdict: Verdict | None
    answer: Answer
    numbers: list[Number]
    attempts: list[Attempt]
    counts: Counts


class FactValue(Shape, frozen=True):
    """One value of a fact and the ranks that have it."""

    value: str
    ranks: list[int]


class FactDifference(Shape, frozen=True):
    """A fact on which ranks differ."""

    fact: str
    severity: Literal["critical", "warning", "info"]
    values: list[FactValue]


class Fact(Shape, frozen=True):
    """A fact on which all ranks agree."""

    fact: str
    value: str


class EnvironmentAnswer(Shape, frozen=True):
    """What differs between the ranks' environments, and what they share."""

    text: str
    ranks: list[int]
    missing: list[int]
    differences: list[FactDifference]
    common: list[Fact]
