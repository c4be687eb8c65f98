"""Answers about findings and the verdict."""

from __future__ import annotations

import msgspec

from rankscope_server.answers import Capped, Schema
from rankscope_server.api.commands.schema import CommandRow


class Evidence(Schema, frozen=True):
    """One fact behind a finding; `link` is relative to the dashboard's root."""

    text: str
    link: str = ""


class Folded(Schema, frozen=True):
    """A finding that the verdict explains."""

    id: int | None
    what: str


class ShownFinding(Schema, frozen=True):
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
    cost_rank_hours: float | None = None  # from its onset up to its end, or the newest step
    cost_money_per_day: float | None = None  # None: no price of its hosts is set
    currency: str = ""
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


class ShownVerdict(ShownFinding, frozen=True):
    """The finding that explains the run best, with those grouped under it."""

    folded: list[Folded] = msgspec.field(default_factory=list)
    deciding: list[str] = msgspec.field(default_factory=list)  # what would make it sure


class HistoryEvent(Schema, frozen=True):
    """Something that happened to a finding."""

    time_ms: float
    event: str
    text: str


class FindingStack(Schema, frozen=True):
    """Python stacks of one rank that a finding names."""

    rank: int
    time_ms: float
    reason: str
    text: str


class FindingDetail(ShownFinding, frozen=True):
    """A finding with its history, and the stacks of the ranks it names."""

    history: list[HistoryEvent] = msgspec.field(default_factory=list)
    stacks: list[FindingStack] = msgspec.field(default_factory=list)  # of a hang
    stacks_capped: Capped | None = None
    commands: list[CommandRow] = msgspec.field(default_factory=list)  # what it asked for


class Detector(Schema, frozen=True):
    """Whether a detector could look."""

    name: str
    text: str = ""
    state: str = ""
    reason: str = ""
    remedy: str = ""


class Findings(Schema, frozen=True):
    """Every finding of a run, and what looked for them."""

    open: list[ShownFinding]
    recovered: list[ShownFinding]
    detectors: list[Detector]
    steps: int
    recovered_capped: Capped | None = None  # the newest ones
