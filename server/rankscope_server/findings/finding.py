"""What a detector returns: findings, and whether it could look at all.

Times are wall-clock milliseconds, shares are 0-1. `None` means not known. A finding names
culprits in `ranks`; victims appear in `evidence` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from rankscope_server.findings.kinds import check

Severity: TypeAlias = Literal["critical", "warning", "info"]
FindingState: TypeAlias = Literal["open", "recovered"]
DetectorState: TypeAlias = Literal["ran", "skipped"]

NOT_HERE = "nothing to do"  # the remedy where a diagnosis does not apply to the run
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")  # worst first


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a finding; `link` is a path relative to the dashboard's root."""

    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A number that values were compared with: a line in the chart of this key of its picture."""

    chart: str
    label: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Who, since when, why, at what cost, and what to do."""

    key: str  # the same finding has the same key in every look
    detector: str
    kind: str
    severity: Severity
    attempt: int
    what: str
    why: str
    next: str
    confidence: float
    confidence_text: str
    would_be_wrong_if: str
    policy_hash: str
    state: FindingState = "open"
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str | None = None
    onset_step: int | None = None
    onset_ms: float | None = None
    ended_step: int | None = None
    cost_throughput_ratio: float | None = None
    cost_rank_hours_per_day: float | None = None
    cost_rank_hours: float | None = None  # from its onset up to its end, or the newest step
    next_command: str = ""
    evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    explained_by: str | None = None  # key of the finding that explains this one
    victims: tuple[int, ...] = ()  # ranks that only wait; for the pages, never accused
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a kind that is not in the registry."""
        check(self.kind, self.detector)


@dataclass(frozen=True, slots=True)
class DetectorStatus:
    """Whether a detector could look, and if not, what it lacks and how to give it."""

    name: str
    text: str  # what it looks for, one sentence
    state: DetectorState
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DetectorResult:
    """What one detector says in one look."""

    status: DetectorStatus
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = field(default=())  # what was compared and found equal
    # What could not be evaluated for lack of data, a sentence each: such a run is not "healthy"
    not_known: tuple[str, ...] = field(default=())
    # Time that is lost, by design or by too little for a finding, a clause each: "healthy" says it
    also_lost: tuple[str, ...] = field(default=())


class Named(Protocol):
    """What names a detector."""

    @property
    def name(self) -> str:
        """Return its name."""


def skipped(detector: Named, reason: str, remedy: str) -> DetectorResult:
    """Return that a detector could not look, what it lacks and how to give it."""
    return DetectorResult(
        DetectorStatus(detector.name, str(detector.__doc__), "skipped", reason, remedy)
    )


def ran(
    detector: Named,
    findings: Iterable[Finding] = (),
    checked: Iterable[str] = (),
    note: str = "",
    not_known: Iterable[str] = (),
    also_lost: Iterable[str] = (),
) -> DetectorResult:
    """Return what a detector found, what it found in order, and what it could not evaluate."""
    unknown = tuple(not_known)
    note = "; ".join(text for text in (note, *unknown) if text)
    status = DetectorStatus(detector.name, str(detector.__doc__), "ran", note)
    return DetectorResult(status, tuple(findings), tuple(checked), unknown, tuple(also_lost))
