"""One chart of a picture: who is named over the band of the others, and what that says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rankscope_server.api.pictures.schema import FindingChart, PictureLimit, PictureLine
from rankscope_server.api.steps.queries import Array, bin_of, quiet
from rankscope_server.findings.text import (
    bytes_text,
    ms_text,
    percent_text,
    seconds_text,
    si_text,
    span_text,
)
from rankscope_server.text import plural

WIDTH = 300  # columns


def chart_of(
    key: str, title: str, unit: str, axis: Literal["step", "time"], x: Array, lines: Array,
    labels: Sequence[str], onset: float | None, others: str, *, source: str,
    limits: Sequence[PictureLimit] = (),
) -> FindingChart:  # fmt: skip
    """Return a chart; the first rows of `lines` are those of `labels`, the rest is the band."""
    named, rest = lines[: len(labels)], lines[len(labels) :]
    has_band = bool(len(rest)) and not np.isnan(rest).all()
    low, median, high = (
        quiet(function, rest, axis=0) if has_band else np.full(len(x), np.nan)
        for function in (np.nanmin, np.nanmedian, np.nanmax)
    )
    return FindingChart(
        key=key,
        title=title,
        unit=unit,
        axis=axis,
        text=_text(title, unit, x, named[0], labels[0], median, onset, has_band)
        + "".join(f"; {one.label}: {amount_text(one.value, unit)}" for one in limits),
        source=source,
        x=x.tolist(),
        low=known_values(low) if has_band else None,
        median=known_values(median) if has_band else None,
        high=known_values(high) if has_band else None,
        others=others if has_band else "",
        lines=[
            PictureLine(label=label, values=known_values(row))
            for label, row in zip(labels, named, strict=True)
        ],
        limits=list(limits),
        onset=onset,
    )


def _text(
    title: str, unit: str, x: Array, line: Array, label: str, others: Array, onset: float | None,
    has_band: bool,
) -> str:  # fmt: skip
    """Return what the picture shows, before and since the onset."""
    if onset is None:
        known = line[~np.isnan(line)]
        first, last = _usual(known[:1], unit), _usual(known[-1:], unit)
        return f"{title}: {label} had {first} at first and {last} at last"
    since = x >= onset
    words = f"{title}: {label} had {_usual(line[since], unit)} since the onset"
    if not since.all():
        words += f", {_usual(line[~since], unit)} before"
    if has_band:
        words += f"; the others {_usual(others[since], unit)}"
    gaps = int(np.isnan(line[since]).sum())
    return words + (
        f"; no value in {gaps:,} of {plural(int(since.sum()), 'place')}" if gaps else ""
    )


def _usual(values: Array, unit: str) -> str:
    """Return the median of what is known, in words."""
    value = float(quiet(np.nanmedian, values))
    if np.isnan(value):
        return "no value"
    return amount_text(value, unit)


def amount_text(value: float, unit: str) -> str:
    """Return a value with its unit."""
    if unit == "bytes":
        return bytes_text(value)
    if unit == "bytes/s":
        return f"{bytes_text(value)}/s"
    if unit == "ratio":
        return percent_text(value)
    if unit == "ms":
        return ("\N{MINUS SIGN}" if value < 0 else "") + ms_text(abs(value))
    if unit == "s":
        return seconds_text(value) if value < 120 else span_text(value)
    return si_text(value, unit)


def binned(x: Array, lines: Array) -> tuple[Array, Array]:
    """Return bins of steps; of each the largest value."""
    size = bin_of(len(x), WIDTH)
    if size == 1:
        return x, lines
    starts = np.arange(0, len(x), size)
    return x[starts], np.fmax.reduceat(lines, starts, axis=1)


def known_values(values: Array) -> list[float | None]:
    """Return floats of six digits, None for NaN and infinity."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
