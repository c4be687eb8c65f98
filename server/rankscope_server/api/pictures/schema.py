"""Answers about what findings look like."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Schema

SpanState: TypeAlias = Literal["ran", "waits", "inside", "stopped", "event"]


class PictureLine(Schema, frozen=True):
    """A rank, GPU or host that a finding names; a value for each `x`, null where not known."""

    label: str
    values: list[float | None]


class PictureLimit(Schema, frozen=True):
    """What values are compared with: a line over the whole picture."""

    label: str
    value: float


class FindingChart(Schema, frozen=True):
    """One quantity around the onset of a finding: who it names, over the band of the others.

    `x` are steps, or ms since the epoch; a bin holds the largest of its values, where it holds
    several. Without others the band is null.
    """

    key: str
    title: str
    unit: str
    axis: Literal["step", "time"]
    text: str  # what the picture shows, in a sentence
    source: str  # who measured it, and by whose clock
    x: list[float]
    low: list[float | None] | None
    median: list[float | None] | None
    high: list[float | None] | None
    others: str  # whom the band holds
    lines: list[PictureLine]
    limits: list[PictureLimit]
    onset: float | None


class PictureBar(Schema, frozen=True):
    """A bar: a value for each part of it, null where not known."""

    label: str
    is_named: bool  # by the finding
    values: list[float | None]


class FindingBars(Schema, frozen=True):
    """Amounts beside each other; with several parts each bar is divided into them."""

    key: str
    title: str
    unit: str
    text: str
    source: str
    parts: list[str]
    bars: list[PictureBar]
    limits: list[PictureLimit]


class PictureSpan(Schema, frozen=True):
    """What was so from when to when; an event has no length. Where there is none, no data."""

    begin_ms: float
    end_ms: float
    state: SpanState
    text: str


class PictureLane(Schema, frozen=True):
    """A rank, GPU or host over time."""

    label: str
    is_named: bool  # by the finding
    spans: list[PictureSpan]


class FindingLanes(Schema, frozen=True):
    """Who did what when, in ms since the epoch."""

    key: str
    title: str
    text: str
    source: str
    begin_ms: float
    end_ms: float
    lanes: list[PictureLane]
    others: str  # of how many others some have a lane
    onset: float | None


class FindingTable(Schema, frozen=True):
    """What is no amount: which values were seen on which ranks."""

    key: str
    title: str
    text: str
    source: str
    columns: list[str]
    rows: list[list[str]]


class FindingPicture(Schema, frozen=True):
    """What a finding looks like in stored samples and records; without any `reason` says why.

    `notes` say what is missing beside that which is shown, as retention removed it.
    """

    charts: list[FindingChart]
    bars: list[FindingBars]
    lanes: list[FindingLanes]
    tables: list[FindingTable]
    notes: list[str]
    reason: str


Part: TypeAlias = FindingChart | FindingBars | FindingLanes | FindingTable
