"""Answers about steps and series: map, throughput, budget, samples, metrics."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, Schema

Order: TypeAlias = Literal["rank", "worst", "node", "stage"]  # besides `group:NAME` of each kind


class MapRow(Schema, frozen=True):
    """One lane of the map."""

    label: str
    ranks: list[int]  # with order `worst` those that deviate most come first
    worst_rank: int | None  # of them the one that deviates most over the range; None: no data
    host: str
    group: str  # the node or stage that its lanes share; empty where lanes are not grouped
    ranks_capped: Capped | None = None


class PinnedRow(Schema, frozen=True):
    """A lane that is shown above the map at every zoom."""

    rank: int
    label: str
    host: str
    why: str
    max_ratio: float | None
    max_z: float | None  # of it: robust standard deviations of the noise of single steps
    cells: str
    missing: str


class Mark(Schema, frozen=True):
    """A step worth a tick."""

    step: int
    kind: Literal["onset", "checkpoint", "attempt", "first"]
    text: str


class MapBand(Schema, frozen=True):
    """One way to divide the ranks, and the group of each lane and pinned rank."""

    key: str  # "node", "stage", or "group:" and a kind of process groups; also an order
    title: str
    names: list[str]
    lanes: list[int]  # a place in `names`; -1: of several, of none, or not known
    pins: list[int]


class Usual(Schema, frozen=True):
    """Ratios of the cells of a picture as they are anyway: the middle one, and its noise."""

    ratio: float
    lo: float
    hi: float
    sigma: float  # one robust standard deviation of their log2


class Map(Schema, frozen=True):
    """Ranks by steps, one byte a cell; a bin shows its worst cell."""

    metric: str
    order: str
    unit: Literal["ratio", "ms"]
    reference: Literal["peers", "own"] | None
    reference_text: str
    value_lo: float | None
    value_hi: float | None
    usual: Usual | None
    noise: Usual | None  # the same of single steps, however wide the bins are
    step_lo: int
    step_hi: int
    bin: int
    columns: int
    rank_bin: int
    rows: list[MapRow]
    cells: str
    missing: str
    pinned: list[PinnedRow]
    bands: list[MapBand]
    marks: list[Mark]
    time_ms: list[float | None]
    world_size: int
    text: str
    marks_capped: Capped | None = None


class Cell(Schema, frozen=True):
    """Exact numbers of one rank in one step."""

    rank: int
    step: int
    host: str
    ratio: float | None
    reference_ms: float | None
    own_work_ms: float | None
    step_ms: float | None
    phases: dict[str, float | None]
    blocked_ms: float | None
    cpu_ms: float | None
    time_ms: float | None
    flags: list[str]


class BesidePeers(Schema, frozen=True):
    """Steps of one rank beside those of its peers; of a bin the median, `worst_ms` the longest."""

    metric: str
    rank: int
    num_peers: int
    bin: int
    step: list[int]
    value_ms: list[float | None]
    worst_ms: list[float | None]
    peers_lo_ms: list[float | None]
    peers_median_ms: list[float | None]
    peers_hi_ms: list[float | None]
    text: str


class Throughput(Schema, frozen=True):
    """Step times per bin of steps."""

    bin: int
    step: list[int]
    time_ms: list[float | None]
    step_min_ms: list[float | None]
    step_median_ms: list[float | None]
    step_max_ms: list[float | None]
    before_ms: float | None
    now_ms: float | None
    onset_step: int | None


class StepRow(Schema, frozen=True):
    """One step of the job.

    `step_ms` is that of the rank that took longest, `waiting_ratio` the share of all ranks' time
    that was waiting for others. The slowest rank is the one whose self time is longest beside its
    reference: `slowest_ratio` times as long.
    """

    step: int
    time_ms: float | None
    num_ranks: int  # that sent it by now
    step_ms: float | None
    waiting_ratio: float | None
    slowest_rank: int | None
    slowest_ratio: float | None


class Steps(Schema, frozen=True):
    """Steps of the job in their order; `next_step` begins the next answer, null at the end."""

    num_expected: int  # ranks of the newest attempt
    last_step: int
    steps: list[StepRow]
    next_step: int | None


class BudgetRow(Schema, frozen=True):
    """What the step of one rank consists of, as a mean over the steps asked for."""

    label: str
    rank: int | None
    total_ms: float
    parts: dict[str, float]


class Budget(Schema, frozen=True):
    """What a step consists of."""

    step_lo: int
    step_hi: int
    rows: list[BudgetRow]
    parts: list[str]
    text: str


class MetricSeries(Schema, frozen=True):
    """One number of training; `value` is the last of each bin, null where it was not finite."""

    name: str
    rank: int
    step: list[int]
    value: list[float | None]
    min: list[float | None]
    max: list[float | None]


class MetricsAnswer(Schema, frozen=True):
    """Numbers that the script logged."""

    names: list[str]
    series: list[MetricSeries]
    capped: Capped | None = None
