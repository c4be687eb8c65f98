"""Answers about what findings look like."""

from __future__ import annotations

from typing import Literal

from rankscope_server.answers import Schema


class PictureLine(Schema, frozen=True):
    """A rank, GPU or host that a finding names; a value for each `x`, null where not known."""

    label: str
    values: list[float | None]


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
    x: list[float]
    low: list[float | None] | None
    median: list[float | None] | None
    high: list[float | None] | None
    others: str  # whom the band holds
    lines: list[PictureLine]
    onset: float | None


class FindingPicture(Schema, frozen=True):
    """What a finding looks like in stored samples and records; without charts `reason` says why.

    Both are empty for kinds of findings that have no such picture.
    """

    charts: list[FindingChart]
    reason: str
