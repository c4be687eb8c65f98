"""Answers about ranks, collectives and errors."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rankscope_server.answers import Capped, LeftOut, Schema
from rankscope_server.findings.finding import Severity

RankStatus: TypeAlias = Literal["running", "silent", "ended", "failed", "stuck"]


class RankRow(Schema, frozen=True):
    """One rank: where it is."""

    rank: int
    host: str
    node_rank: int | None
    local_rank: int | None
    pid: int | None
    attempt: int
    state: RankStatus
    step: int
    phase: str | None
    phase_since_ms: float | None
    last_seen_ms: float | None
    exit_text: str
    stage: int | None
    sources: dict[str, str]
    cpu_seconds: float | None
    rss_bytes: int | None
    # the gravest open finding that names it, of equal ones that which costs most
    finding_id: int | None
    finding_kind: str | None
    finding_severity: Severity | None
    finding_what: str | None


class Ranks(Schema, frozen=True):
    """Every rank of the newest attempt, or of the one asked for."""

    ranks: list[RankRow]


class GroupRow(Schema, frozen=True):
    """Where one rank is in one process group."""

    group: str
    description: str
    backend: str
    ranks: list[int]
    issued: int | None  # collectives
    ended: int | None
    exchanges: int | None  # sends and receives issued
    operation: str
    size_bytes: int | None
    issued_ms: float | None
    call_site: str


class CollectiveRecord(Schema, frozen=True):
    """One collective or point-to-point operation of one rank."""

    attempt: int
    rank: int
    step: int
    group: str
    sequence: int
    operation: str
    dtype: str
    size_bytes: int
    num_tensors: int
    peer_rank: int | None
    arrived_ms: float
    started_ms: float | None  # after arrival, as the next ones
    duration_ms: float | None
    device_ms: float | None  # what the device measured itself
    returned_ms: float | None
    blocked_ms: float | None
    state: str
    ended_by: str  # the source of the end, empty where there is none
    is_async: bool
    is_p2p: bool
    end_is_upper_bound: bool
    call_site: str


class CollectiveRecords(Schema, frozen=True):
    """Raw records, newest first."""

    rows: list[CollectiveRecord]
    capped: Capped | None = None
    left_out: list[LeftOut] = msgspec.field(default_factory=list)


class StackRow(Schema, frozen=True):
    """Python stacks of one rank, innermost frame first."""

    time_ms: float
    reason: str
    text: str
    command_id: int | None = None  # the request that asked for them


class RankDetail(RankRow, frozen=True):
    """One rank in full."""

    role: str
    backend: str
    local_world_size: int | None
    world_size: int | None
    num_stages: int | None
    num_microbatches: int | None
    schedule: str
    registered_ms: float | None
    ended_ms: float | None
    end_reason: str | None
    exit_code: int | None
    exit_signal: int | None
    end_detail: str
    groups: list[GroupRow]
    collectives: list[CollectiveRecord]
    stacks: list[StackRow]
    stacks_capped: Capped | None = None  # the newest ones


class CollectiveRow(Schema, frozen=True):
    """One operation, group and size."""

    operation: str
    group: str
    group_text: str
    num_ranks: int | None
    size_bytes: int
    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    exposed_ms_per_step: float | None
    open: int


class Collectives(Schema, frozen=True):
    """What was communicated, the most exposed first; of which attempts, and steps of a range."""

    rows: list[CollectiveRow]
    text: str
    capped: Capped | None = None
    count: int = 0  # of all rows, those that were cut included
    attempts: list[int] = msgspec.field(default_factory=list)
    step_lo: int | None = None
    step_hi: int | None = None
    left_out: list[LeftOut] = msgspec.field(default_factory=list)


class ErrorGroup(Schema, frozen=True):
    """Errors of one cause."""

    id: str
    type: str
    message: str
    ranks: list[int]
    count: int
    first_ms: float
    last_ms: float
    step: int
    role: Literal["initiating", "cascade", "unknown"]
    traceback: str
    why_grouped: str
    why_role: str


class Errors(Schema, frozen=True):
    """Error groups, first in time first."""

    groups: list[ErrorGroup]
    capped: Capped | None = None
