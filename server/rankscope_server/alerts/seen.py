"""What rules look at: live runs and the server itself, at one moment. Plain values.

Times are nanoseconds of the server's clock. `None` means not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope_server.findings.finding import Severity
from rankscope_server.prices import Rate

OVER = frozenset({"ended", "failed"})  # statuses of runs of which no more will come


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFinding:
    """A finding as it is stored."""

    id: int
    kind: str
    severity: Severity
    confidence: float
    is_over: bool
    is_explained: bool  # by another finding
    opened_ns: int
    ranks: tuple[int, ...] = ()
    what: str = ""
    why: str = ""
    next: str = ""
    throughput_ratio: float | None = None
    rank_hours_per_day: float | None = None


@dataclass(frozen=True, slots=True)
class SeenRank:
    """A rank of the newest attempt."""

    rank: int
    host: str
    heard_ns: int
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SeenCollector:
    """The collector of a node."""

    host: str
    heard_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLoss:
    """What of a run did not come to be stored."""

    records: int = 0  # that agents dropped, as they say
    batches: int = 0  # that lack between others of their collector
    refused: int = 0  # records that this server did not take
    worst: str = ""  # where most was dropped, and why

    @property
    def total(self) -> int:
        """Return all of it, a batch as one."""
        return self.records + self.batches + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run that was live lately, or of which an alert is open."""

    run_id: str
    name: str = ""
    project: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    status: str = "running"
    is_live: bool = True  # something was heard of it lately
    step: int = 0
    stepped_ns: int = 0  # since when it is at this step
    findings: tuple[SeenFinding, ...] = ()
    ranks: tuple[SeenRank, ...] = ()
    collectors: tuple[SeenCollector, ...] = ()
    lost: SeenLoss = field(default_factory=lambda: SeenLoss())
    spent_rank_hours: float | None = None  # where a rule asks for it
    rate: Rate | None = None  # what an hour of a rank costs

    @property
    def is_over(self) -> bool:
        """Return whether no more will come of it."""
        return self.status in OVER


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenServer:
    """This server."""

    behind_seconds: float = 0.0  # for how long what was sent waits to be stored and looked at
    queue_ratio: float = 0.0
    disk_free_bytes: int | None = None
    database_bytes: int | None = None  # with its indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything at one moment."""

    now_ns: int
    hearing_since_ns: int = 0  # before, this server could not hear: silence counts from here
    runs: tuple[SeenRun, ...] = ()
    server: SeenServer = SeenServer()
