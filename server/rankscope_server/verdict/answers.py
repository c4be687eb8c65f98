"""What one look at a run says: findings, verdict, the first sentence, status and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rankscope_server.findings.finding import DetectorStatus, Finding
from rankscope_server.observe.stage_table import Place
from rankscope_server.verdict.cost import Cost

RunStatus: TypeAlias = Literal["starting", "running", "stuck", "ended", "failed", "silent"]
AnswerState: TypeAlias = Literal["culprit", "advice", "healthy", "waiting", "unknown"]


@dataclass(frozen=True, slots=True)
class GroupedFinding:
    """A finding that the verdict explains; `key` is that of the finding."""

    key: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Finding):
    """The finding that explains the run best, and those that it explains."""

    folded: tuple[GroupedFinding, ...] = ()
    deciding: tuple[str, ...] = ()  # measurements that would make a doubtful verdict sure


@dataclass(frozen=True, slots=True)
class Answer:
    """The first sentence about a run, with or without a verdict."""

    state: AnswerState
    text: str
    detail: str = ""
    deciding: tuple[str, ...] = ()  # measurements without which there is no verdict
    notes: tuple[str, ...] = ()  # what is recorded in part, or on some ranks alone; coverage


@dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank that nothing was heard of for a while, and that did not say goodbye."""

    rank: int
    last_seen_ms: float | None
    step: int


@dataclass(frozen=True, slots=True)
class LossRow:
    """Records that an agent lost."""

    host: str
    rank: int
    source: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the newest attempt is seen. Refused records are counted by the server."""

    expected: int
    registered: int
    reporting: int
    silent: tuple[SilentRank, ...]
    losses: tuple[LossRow, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """The whole answer at one moment."""

    findings: list[Finding]
    detectors: list[DetectorStatus]
    verdict: Verdict | None
    answer: Answer
    status: RunStatus
    status_text: str
    coverage: Coverage
    attempt: int = 0
    step: int = 0
    cost: Cost | None = None  # of a short while ago
    places: Mapping[int, Place] = field(default_factory=dict)  # that no rank says itself
