"""Answers about steps and series: map, throughput, budget, samples, metrics."""

from __future__ import annotations

from typing import Literal

from rankscope_server.answers import Capped, Shape


class MapRow(Shape, frozen=True):
    """One lane of the map."""

    label: str
    rank_lo: int
    rank_hi: int
    host: str


class PinnedRow(Shape, frozen=True):
    """A lane that stands above the map at every zoom."""

    rank: int
    label: str
    host: str
    why: str
    max_ratio: float | None
    cells: str
    missing: str


class Mark(Shape, frozen=True):
    """A step worth a tick."""

    step: int
    kind: Literal["onset", "checkpoint", "attempt", "first"]
    text: str


class Map(Shape, frozen=True):
    """Ranks by steps, one byte a cell; a bin shows its worst cell."""

    metric: str
    unit: Literal["ratio", "ms"]
    reference: Literal["peers", "own"] | None
    reference_text: str
    value_lo: float | None
    value_hi: float | None
    step_lo: int
    step_hi: int
    bin: int
    columns: int
    rank_bin: int
    rows: list[MapRow]
    cells: str
    missing: str
    pinned: list[PinnedRow]
    marks: list[Mark]
    time_ms: list[float | None]
    world_size: int
    text: str


class Cell(Shape, frozen=True):
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


class Throughput(Shape, frozen=True):
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


class BudgetRow(Shape, frozen=True):
    """Where the step of one rank goes, as a mean over the steps asked for."""

    label: str
    rank: int | None
    total_ms: float
    parts: dict[str, float]


class Budget(Shape, frozen=True):
    """Where a step goes."""

    step_lo: int
    step_hi: int
    rows: list[BudgetRow]
    parts: list[str]
    text: str


class SampleSeries(Shape, frozen=True):
    """Least and largest value per slice of time; what is missing is null.

    A counter is told as its rate. `label` says which device, interface or process it is.
    """

    host: str
    gpu: int | None
    label: str
    name: str
    unit: str
    time_ms: list[float]
    min: list[float | None]
    max: list[float | None]


class Samples(Shape, frozen=True):
    """Samples of one kind, of the machines of a run."""

    hosts: list[str]
    names: list[str]
    series: list[SampleSeries]
    capped: Capped | None = None


class MetricSeries(Shape, frozen=True):
    """One number of training; `value` is the last of each bin, null where it was not finite."""

    name: str
    rank: int
    step: list[int]
    value: list[float | None]
    min: list[float | None]
    max: list[float | None]


class MetricsAnswer(Shape, frozen=True):
    """Numbers that the script logged."""

    names: list[str]
    series: list[MetricSeries]
    capped: Capped | None = None
