"""Answers about one step: lanes, slices, operations, the critical path and why it is slow."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, LeftOut, Schema

# What a slice is; an answer names a kind by its place in this list.
SliceKind: TypeAlias = Literal[
    "data", "forward", "backward", "communication", "waiting", "bubble", "blocked", "optimizer",
    "checkpoint", "evaluation", "other", "work", "unknown",
]  # fmt: skip
Cause: TypeAlias = Literal[
    "rank", "all_ranks", "data", "checkpoint", "evaluation", "communication", "first_step",
    "missing", "device", "none", "unknown",
]  # fmt: skip


class StepEvidence(Schema, frozen=True):
    """One fact behind the answer, and the page of the dashboard that shows it."""

    text: str
    href: str | None = None


class StepAnswer(Schema, frozen=True):
    """Why a step is slow, or that it is not; `is_slow` is null where nothing can be compared."""

    what: str
    is_slow: bool | None
    cause: Cause
    ranks: list[int]
    step_ms: float | None
    reference_ms: float | None
    reference_text: str
    evidence: list[StepEvidence]


class Lane(Schema, frozen=True):
    """One rank of the timeline. Parts of the step are ms; null: not known."""

    rank: int
    host: str
    stage: int | None
    why: str
    state: Literal["recorded", "no data", "not measured"]
    begin_us: int | None
    end_us: int | None
    self_ms: float | None
    peers_ms: float | None
    data_ms: float | None
    waiting_ms: float | None
    communication_ms: float | None
    clock_ahead_ms: float | None
    clock_band_ms: float | None


class Slices(Schema, frozen=True):
    """Columns of one length, by lane and time. -1: of no operation, of no microbatch."""

    lane: list[int]
    kind: list[int]
    begin_us: list[int]
    end_us: list[int]
    call: list[int]
    microbatch: list[int]


class Flights(Schema, frozen=True):
    """Operations in flight, from the call to the end; columns of one length, by lane and time."""

    lane: list[int]
    call: list[int]
    begin_us: list[int]
    end_us: list[int]


class StepCall(Schema, frozen=True):
    """One collective, or one send with its receive.

    `transfer_ms` is the shortest time of a member, from its call to the end: the last to arrive
    waits least. Of an exchange it is from the later call to the end of a receive that waited.
    `late_ms` is by how much the last came after the one before it.
    """

    operation: str
    group: str
    group_text: str
    sequence: int
    size_bytes: int
    num_members: int | None
    num_recorded: int
    last_rank: int | None
    is_sure: bool
    late_ms: float | None
    skew_ms: float | None
    transfer_ms: float | None
    usual_ms: float | None
    source: int | None
    target: int | None


class PathPart(Schema, frozen=True):
    """A part of the critical path: a rank works, or an operation is under way on it."""

    rank: int
    begin_us: int
    end_us: int
    call: int
    is_sure: bool


class SlowStep(Schema, frozen=True):
    """A step near this one, by how long it took."""

    step: int
    step_ms: float


class FoldedHost(Schema, frozen=True):
    """Ranks of a host that have no lane: the band of their self time, the median of their waits."""

    host: str
    ranks: str  # as the address takes them
    num_ranks: int
    num_known: int
    worst_rank: int | None
    least_ms: float | None
    median_ms: float | None
    most_ms: float | None
    blocked_ms: float | None


class StepTimeline(Schema, frozen=True):
    """One step of the lanes chosen, on one clock. Times are microseconds since `began_ms`."""

    step: int
    attempt: int
    began_ms: float | None
    length_us: int
    world_size: int
    num_nodes: int
    answer: StepAnswer
    kinds: list[SliceKind]
    lanes: list[Lane]
    slices: Slices
    flights: Flights
    calls: list[StepCall]
    path: list[PathPart]
    path_text: str
    clock_text: str
    is_clock_sure: bool
    phases_text: str
    notes: list[str]
    slowest: list[SlowStep]
    step_lo: int
    step_hi: int
    left_out: list[LeftOut]
    folded: list[FoldedHost]  # that of the longest self time first
    folded_capped: Capped | None = None
    lanes_capped: Capped | None = None
    calls_capped: Capped | None = None
