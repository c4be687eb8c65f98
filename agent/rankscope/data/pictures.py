"""A verdict and a map as a notebook shows them: HTML and SVG without scripts, and plain text.

What is in them came from programs and machines: all of it is escaped, and nothing is loaded.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np

from rankscope.terminal import one_line

# Readable on light and on dark paper; the map brings its own, as images know no theme.
_EDGES = {"critical": "#d9453b", "warning": "#c98212", "info": "#3a74b8"}
_SLOW = ("#f7c58f", "#f7aa54", "#e8862a", "#d95f02", "#a8430a", "#7a1e04")
_FAST = ("#9cc4e8", "#6ea8de")
_PAPER, _LANE, _MISSING, _INK = "#ffffff", "#f0f2f5", "#b4bac3", "#171b21"
_MISSING_BYTE, _NEUTRAL, _LARGEST = 255, 127, 254
_USUAL = (1 / 1.08, 1.08)  # where the server does not say what this run's own noise is
_STEP = 0.12  # of a ratio, from one colour to the next
_WIDTH, _LANE_HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 14, 110, 44, 22
_MOST_LABEL, _MOST_TITLE, _TEXT_LANES, _TEXT_COLUMNS = 16, 110, 12, 60
_NOT_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")  # XML 1.0, section 2.2; others are `shown`


class Verdict(str):
    """The verdict in one sentence; a notebook shows it with its reasons, `fields` has them all."""

    fields: dict[str, Any]

    def __new__(cls, overview: dict[str, Any]) -> Verdict:
        """Take what `GET /runs/{run}` answers."""
        verdict = super().__new__(cls, overview["answer"]["text"])
        verdict.fields = overview
        return verdict

    def _repr_html_(self) -> str:
        found, answer = self.fields["verdict"], self.fields["answer"]
        edge = _EDGES.get(found["severity"], _LANE) if found else "#4fc79f"
        if answer["state"] in ("unknown", "waiting"):
            edge = _MISSING
        rows = [_row("", answer["text"], "font-weight:600")]
        if found is None:
            rows += [_row("", answer["detail"])]
        else:
            rows += [_row("Why", found["why"]), _row("Next", found["next"])]
            rows += [_row("Evidence", "; ".join(row["text"] for row in found["evidence"]))]
            rows += [_row("Sure", f"{100 * found['confidence']:.0f} %, {found['confidence_text']}")]
            rows += [_row("Disproved if", found["would_be_wrong_if"])]
        rows += [_row("Coverage", self.fields["coverage"]["text"])]
        style = f"border-left:4px solid {edge};padding:2px 0 2px 12px;margin:4px 0;max-width:60em"
        return f'<div style="{style}">{"".join(rows)}</div>'


class Map:
    """Ranks by steps: `values` has a lane a row and a bin of steps a column, NaN where not known.

    They are ratios to `reference_text`, or milliseconds, as `unit` says. `labels` name the lanes,
    `steps` are the first of each bin.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.unit: str = fields["unit"]
        self.labels: list[str] = [row["label"] for row in fields["rows"]]
        self.steps = np.arange(fields["columns"]) * fields["bin"] + fields["step_lo"]
        levels = np.frombuffer(base64.b64decode(fields["cells"]), np.uint8)
        levels = levels.reshape(len(self.labels), fields["columns"])
        self.values = np.where(levels == _MISSING_BYTE, np.nan, self._values(levels))

    @property
    def text(self) -> str:
        """Return what it shows in one sentence."""
        sentence: str = self.fields["text"]
        return sentence

    def __repr__(self) -> str:
        """Return the sentence and the lanes as signs: · usual, - faster, ░▒▓█ slower, ? unknown."""
        columns = np.linspace(0, max(len(self.steps) - 1, 0), _TEXT_COLUMNS).astype(int)
        lines = [one_line(self.text)]
        for label, row in list(zip(self.labels, self._colours(), strict=True))[:_TEXT_LANES]:
            signs = "".join(_sign(row[at]) for at in dict.fromkeys(columns)) if row else ""
            lines.append(f"{_shortened(one_line(label), _MOST_LABEL):>{_MOST_LABEL}} {signs}")
        if len(self.labels) > _TEXT_LANES:
            lines.append(f"and {len(self.labels) - _TEXT_LANES:,} more lanes")
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        height = _TOP + _LANE_HEIGHT * len(self.labels) + _BOTTOM
        title = _text(_shortened(one_line(self.text), _MOST_TITLE))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" font-family="sans-serif" '
            f'font-size="11" fill="{_INK}">',
            f"<title>{_text(self.text)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="{_PAPER}"/>',
            f'<text x="10" y="18" font-weight="600">{title}</text>',
            *self._legend(),
            *self._lanes(),
            f'<text x="{_LEFT}" y="{height - 8}">step {self.fields["step_lo"]:,}</text>',
            f'<text x="{_WIDTH - 10}" y="{height - 8}" text-anchor="end">'
            f"{self.fields['step_hi']:,}</text>",
            "</svg>",
        ]
        return "".join(parts)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"image/svg+xml": self._repr_svg_(), "text/plain": repr(self)}

    def _values(self, levels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.unit == "ratio":
            ratios: np.ndarray[Any, Any] = 2.0 ** ((levels.astype(float) - _NEUTRAL) / _NEUTRAL)
            return ratios
        low, high = self.fields["value_lo"] or 0.0, self.fields["value_hi"] or 0.0
        return low + (high - low) * levels.astype(float) / _LARGEST

    def _colours(self) -> list[list[str]]:
        """Return a colour of each cell, empty for what is usual, `_MISSING` for what is unknown."""
        if self.unit == "ratio":
            usual = self.fields["usual"]
            low, high = (usual["lo"], usual["hi"]) if usual else _USUAL
            low, high = min(low, _USUAL[0]), max(high, _USUAL[1])
            return [[_colour(value, low, high) for value in row] for row in self.values.tolist()]
        low, high = self.fields["value_lo"] or 0.0, self.fields["value_hi"] or 0.0
        stretch = (high - low) / len(_SLOW) or 1.0
        return [
            [_MISSING if math.isnan(value) else _level(_SLOW, (value - low) / stretch)
             for value in row]
            for row in self.values.tolist()
        ]  # fmt: skip

    def _lanes(self) -> Iterator[str]:
        """Yield the lanes and their names, then the cells, one path for each colour."""
        paths: dict[str, list[str]] = {}
        wide = (_WIDTH - 10 - _LEFT) / max(len(self.steps), 1)
        for number, (label, row) in enumerate(zip(self.labels, self._colours(), strict=True)):
            y = _TOP + number * _LANE_HEIGHT
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - 10 - _LEFT}" '
                f'height="{_LANE_HEIGHT - 1}" fill="{_LANE}"/>'
                f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end">'
                f"{_text(_shortened(one_line(label), _MOST_LABEL))}</text>"
            )
            for first, end, colour in _runs(row):
                x, length = _LEFT + first * wide, (end - first) * wide
                box = f"M{x:.1f} {y}h{length:.1f}v{_LANE_HEIGHT - 1}h-{length:.1f}z"
                paths.setdefault(colour, []).append(box)
        for colour, boxes in paths.items():
            yield f'<path fill="{colour}" d="{"".join(boxes)}"/>'

    def _legend(self) -> Iterator[str]:
        """Yield the colours with what they mean."""
        if self.unit == "ratio":
            entries = [(_FAST[-1], "faster"), (_LANE, "usual"), (_SLOW[1], "slower"),
                       (_SLOW[-1], "much slower"), (_MISSING, "not known")]  # fmt: skip
        else:
            low, high = self.fields["value_lo"] or 0.0, self.fields["value_hi"] or 0.0
            entries = [(_SLOW[0], f"{low:.3g} ms"), (_SLOW[-1], f"{high:.3g} ms"),
                       (_MISSING, "not known")]  # fmt: skip
        for number, (colour, name) in enumerate(entries):
            x = _LEFT + 110 * number
            yield f'<rect x="{x}" y="26" width="10" height="10" fill="{colour}"/>'
            yield f'<text x="{x + 14}" y="35">{name}</text>'


def _row(name: str, text: str, style: str = "") -> str:
    if not text:
        return ""
    head = f'<span style="opacity:.75">{name}: </span>' if name else ""
    return f'<div style="{style}">{head}{_text(text)}</div>'


def _text(text: str) -> str:
    """Return a text for HTML and for SVG, in one line in which nothing acts."""
    return escape(_NOT_XML.sub("\ufffd", one_line(text)))


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour(ratio: float, low: float, high: float) -> str:
    if math.isnan(ratio):
        return _MISSING
    if ratio > high:
        return _level(_SLOW, (ratio - high) / _STEP)
    return _level(_FAST, (low - ratio) / _STEP) if ratio < low else ""


def _level(colours: tuple[str, ...], at: float) -> str:
    return colours[min(max(int(at), 0), len(colours) - 1)]


def _runs(row: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield from where to where cells have the same colour; none for what is usual."""
    first = 0
    for at in range(1, len(row) + 1):
        if at == len(row) or row[at] != row[first]:
            if row[first]:
                yield first, at, row[first]
            first = at


def _sign(colour: str) -> str:
    if colour in _SLOW:
        return "░▒▒▓▓█"[_SLOW.index(colour)]
    return {"": "·", _MISSING: "?"}.get(colour, "-")
