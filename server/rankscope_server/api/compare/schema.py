"""The answer about two windows of steps beside each other."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rankscope_server.answers import Capped, LeftOut, Schema
from rankscope_server.api.runs.schema import RunStatus

ChangeState: TypeAlias = Literal["longer", "shorter", "same", "unknown"]


class CompareSide(Schema, frozen=True):
    """One of the two: a run, one of its attempts, some of its steps."""

    run_id: str
    name: str
    label: str  # how this answer calls it
    status: RunStatus
    started_ms: float | None
    is_imported: bool
    world_size: int | None
    num_nodes: int | None
    attempt: int
    attempts: list[int]
    step_lo: int  # of what is compared
    step_hi: int
    first_step: int  # of the attempt
    last_step: int
    num_steps: int  # of which the time is known
    onset_step: int | None  # since when what the verdict names holds
    code: dict[str, str]


class CompareRow(Schema, frozen=True):
    """A step, or one of its parts, of each side; pairs of blocks differ by low to high ms."""

    part: str
    label: str
    before_median_ms: float | None
    before_p95_ms: float | None
    after_median_ms: float | None
    after_p95_ms: float | None
    difference_ms: float | None
    low_ms: float | None
    high_ms: float | None
    ratio: float | None
    state: ChangeState


class CompareRate(Schema, frozen=True):
    """How much is done: work of a step, work in a second."""

    name: str
    label: str
    unit: str
    before: float | None
    after: float | None
    ratio: float | None


class CompareTimes(Schema, frozen=True):
    """Steps of each side by their time, in bins of one width; and how many are beyond the last."""

    edges_ms: list[float]
    before: list[int]
    after: list[int]
    before_beyond: int
    after_beyond: int


class CompareSpread(Schema, frozen=True):
    """How times vary: 5, 25, 50, 75 and 95 % of the steps of each side take at most so many ms.

    Of a part of the step, of the self time of a rank, or of that of all ranks in their medians.
    """

    label: str
    before_ms: list[float] | None
    after_ms: list[float] | None
    difference_ms: float | None  # of the medians
    state: ChangeState
    part: str = ""
    rank: int | None = None


class CompareCourse(Schema, frozen=True):
    """Step times in bins from the first step of each side on: least, median and largest."""

    bin: int
    before_step: list[int]  # first step of each bin; the sides may begin at different ones
    after_step: list[int]
    before_min_ms: list[float | None]
    before_median_ms: list[float | None]
    before_max_ms: list[float | None]
    after_median_ms: list[float | None]
    after_max_ms: list[float | None]


class CompareFact(Schema, frozen=True):
    """A fact, a node or an option that differs."""

    fact: str
    kind: str
    severity: Literal["critical", "warning", "info"]
    text: str
    before: list[str]
    after: list[str]


class CompareFinding(Schema, frozen=True):
    """A finding of one side or of both, by its kind and whom it names."""

    kind: str
    severity: str
    what: str
    ranks: list[int]
    cost_throughput_ratio: float | None
    before_id: int | None
    after_id: int | None
    before_run: str
    after_run: str


class Comparison(Schema, frozen=True):
    """What changed from one window of steps to another."""

    text: str
    before: CompareSide | None  # null: there is no run to compare with
    after: CompareSide
    step: CompareRow | None
    parts: list[CompareRow]
    rates: list[CompareRate]
    times: CompareTimes | None
    spreads: list[CompareSpread]
    rank_spreads: list[CompareSpread]  # the medians of all ranks, then those that changed most
    spread_text: str
    course: CompareCourse | None
    facts: list[CompareFact]
    num_common_facts: int
    unknown_facts: list[str]  # that one side alone has said
    findings: list[CompareFinding]
    not_comparable: list[str]  # what cannot be compared, and why
    noise_text: str
    facts_capped: Capped | None = None
    unknown_capped: Capped | None = None
    findings_capped: Capped | None = None
    left_out: list[LeftOut] = msgspec.field(default_factory=list)
