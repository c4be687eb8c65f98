"""Answers about preflights; what a verdict holds is that of `rankscope.preflight.model`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from rankscope_server.answers import Capped, Schema

PreflightMetric: TypeAlias = Literal["connect", "rtt", "mtu", "mbit", "loss"]


class PreflightInvitation(Schema, frozen=True):
    """A new preflight: its own token, and the command to paste on every node."""

    id: str
    token: str
    command: str
    expires_ms: float
    num_apart: int = 0  # preflights of the same name whose nodes proved another secret


class PreflightJoined(Schema, frozen=True):
    """A node takes part; agents should not ask more often than each pause."""

    id: str
    num_joined: int
    num_expected: int
    pause_ms: float


class PreflightMember(Schema, frozen=True):
    """A node that joined; `observed` is the address that the server saw."""

    node: str
    node_rank: int | None
    observed: str
    addresses: list[str]
    ports: list[int]
    joined_ms: float | None


class PreflightRoster(Schema, frozen=True):
    """Who is expected and who is there."""

    id: str
    expected: list[str]
    missing: list[str]
    nodes: list[PreflightMember]
    pause_ms: float


class PreflightReports(Schema, frozen=True):
    """Reports newer than a number; brief ones hold no facts and no paths."""

    number: int
    pause_ms: float
    is_brief: bool
    reports: list[dict[str, Any]]


class PreflightFix(Schema, frozen=True):
    """One repair: a command ready to paste; an empty node means each."""

    command: str
    node: str = ""
    owner: str = "you"


class PreflightFinding(Schema, frozen=True):
    """What one check says about one cause."""

    id: str
    status: str
    title: str
    nodes: list[str] = msgspec.field(default_factory=list)
    edges: list[list[str]] = msgspec.field(default_factory=list)
    evidence: dict[str, Any] = msgspec.field(default_factory=dict)
    told: list[str] = msgspec.field(default_factory=list)
    fix: list[PreflightFix] = msgspec.field(default_factory=list)
    explains: list[str] = msgspec.field(default_factory=list)
    would: str = ""
    wrong_if: str = ""
    confidence: str = "proven"


class PreflightResult(Schema, frozen=True):
    """What became of one check."""

    id: str
    family: str
    status: str
    reason: str = ""
    elapsed_ms: float = 0.0


class PreflightVerdict(Schema, frozen=True):
    """The verdict over the reports of a preflight."""

    run_id: str
    expected: list[str]
    reported: list[str]
    findings: list[PreflightFinding]
    results: list[PreflightResult]
    asides: list[PreflightFinding] = msgspec.field(default_factory=list)
    coverage: str = ""
    is_partial: bool = False
    elapsed_ms: float = 0.0
    schema_version: int = 1


class PreflightSummary(Schema, frozen=True):
    """One preflight in a list; `run_id` is the training run that followed."""

    id: str
    run_id: str | None
    coordinated: Literal["server", "upload"]
    created_ms: float
    finished_ms: float | None
    num_nodes: int
    num_failures: int
    num_warnings: int
    status: str  # ok, warn, fail, or unknown: not evaluated yet


class PreflightAnswer(Schema, frozen=True):
    """A preflight, who has not ended yet, and the verdict over what came until now."""

    summary: PreflightSummary
    is_settled: bool
    waiting_for: list[str]
    verdict: PreflightVerdict | None


class Preflights(Schema, frozen=True):
    """A page of preflights, newest first."""

    total: int
    preflights: list[PreflightSummary]


class PreflightCheck(Schema, frozen=True):
    """What became of one check; `what` is its sentence, `reason` why it gave no answer."""

    id: str
    family: str
    what: str
    status: str  # fail, warn, unknown, skipped, ok
    reason: str


class PreflightNode(Schema, frozen=True):
    """One node of a preflight: who it is, and what names it."""

    node: str
    status: str  # fail, warn, missing: it never reported, unknown, ok
    host: str
    node_rank: int | None
    stage: str  # the last that it reported
    observed: str  # the address that the server saw; empty of an upload
    addresses: list[str]
    ports: list[int]  # on which its agent said that it listens
    joined_ms: float | None
    findings: list[str]


class PreflightView(Schema, frozen=True):
    """A preflight as people read it; `is_under_way`: its agents listen, the server may call them.

    Checks come by family: the family with the worst first, in it the worst first.
    """

    summary: PreflightSummary
    text: str
    is_settled: bool
    is_under_way: bool
    waiting_for: list[str]
    coverage: str
    command: str  # repeats it on each node; empty where not all names are known
    findings: list[PreflightFinding]
    checks: list[PreflightCheck]
    nodes: list[PreflightNode]
    last_good: PreflightSummary | None  # the newest earlier one that let a launch go
    capped: Capped | None = None  # of the nodes


class PreflightFlag(Schema, frozen=True):
    """A path that a finding names; row and column are places in `nodes`, -1 means all."""

    row: int
    column: int
    finding: str
    status: str


class PreflightMatrix(Schema, frozen=True):
    """Nodes by nodes, from the row to the column; null and "" were not measured."""

    id: str
    metric: PreflightMetric
    unit: str
    text: str
    nodes: list[str]
    states: list[list[str]]
    values: list[list[float | None]]
    flags: list[PreflightFlag]
    capped: Capped | None = None


class NodePreflight(Schema, frozen=True):
    """What became of one node in one preflight."""

    id: str
    run_id: str | None
    node: str
    host: str
    node_rank: int | None
    observed: str
    created_ms: float
    status: str
    findings: list[str]


class NodeHistory(Schema, frozen=True):
    """The preflights of a node, newest first."""

    node: str
    preflights: list[NodePreflight]
    capped: Capped | None = None


class PairChange(Schema, frozen=True):
    """A path that became worse or better from one preflight to the other."""

    start: str
    end: str
    metric: PreflightMetric
    before: str
    after: str
    is_worse: bool


class PreflightComparison(Schema, frozen=True):
    """What differs between two preflights."""

    before: PreflightSummary
    after: PreflightSummary
    text: str
    new: list[PreflightFinding]
    gone: list[PreflightFinding]
    same: list[PreflightFinding]
    pairs: list[PairChange]
    nodes_new: list[str]
    nodes_gone: list[str]
    capped: Capped | None = None


class Whoami(Schema, frozen=True):
    """The address that the server sees for the caller, and whether a proxy is between."""

    address: str
    is_proxied: bool


class NetTime(Schema, frozen=True):
    """The server's wall clock when the request came and when the answer left."""

    received_ns: int
    sent_ns: int


class BlobTaken(Schema, frozen=True):
    """How fast bytes came in."""

    received_bytes: int
    elapsed_ms: float
    mbit_per_s: float
