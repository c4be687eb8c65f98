"""Answers about resources and numbers of training over all ranks, on one grid of time."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, LeftOut, Schema

Scope: TypeAlias = Literal["rank", "gpu", "node", "job"]
Topic: TypeAlias = Literal["memory", "utilisation", "training"]


class PinnedLine(Schema, frozen=True):
    """One rank, GPU or node beside its peers: of each slice of time its worst value."""

    label: str
    rank: int | None
    host: str
    why: Literal["asked for", "named by a finding", "worst"]
    stands_apart: bool  # most of the time, beyond the noise of its peers
    value: float | None  # the median of its values; of the worst that by which it is so
    values: list[float | None]


class ResourceChart(Schema, frozen=True):
    """One quantity of all ranks, GPUs or nodes: least, median and largest of each slice of time."""

    key: str
    title: str
    topic: Topic
    scope: Scope
    scope_text: str  # whose it is, and of how many it is known
    source_text: str
    unit: str
    worst: Literal["high", "low", "apart"]
    num: int
    expected: int | None
    low: list[float | None]
    median: list[float | None]
    high: list[float | None]
    usual: float | None  # the median of the medians
    pinned: list[PinnedLine]
    pinned_capped: Capped | None = None  # outliers


class Resources(Schema, frozen=True):
    """Resources and numbers of training; every chart has a value for each of `time_ms`."""

    text: str
    attempt: int
    is_over: bool
    bin_ms: float
    time_ms: list[float]  # where each slice begins
    step: list[int | None]  # the newest one by then
    charts: list[ResourceChart]
    missing: list[str]  # quantities that nothing was sent of, and why
    left_out: list[LeftOut]


class ResourceRow(Schema, frozen=True):
    """One chart in numbers, for the table twin."""

    key: str
    title: str
    scope: str
    unit: str
    num: int
    least: float | None
    usual: float | None
    largest: float | None
    worst: str


def plain_rows(charts: list[ResourceChart]) -> list[ResourceRow]:
    """Return one row for each chart."""
    return [
        ResourceRow(
            key=chart.key, title=chart.title, scope=chart.scope, unit=chart.unit, num=chart.num,
            least=min((v for v in chart.low if v is not None), default=None),
            usual=chart.usual,
            largest=max((v for v in chart.high if v is not None), default=None),
            worst=", ".join(line.label for line in chart.pinned if line.why == "worst"),
        )
        for chart in charts
    ]  # fmt: skip
