"""The filters of the search box, as `rank:3-7`: each name with its values and its mistakes."""

from __future__ import annotations

import difflib
import re
from datetime import UTC, datetime
from typing import TypeAlias, cast, get_args, get_type_hints

from rankscope.wire import schema
from rankscope_server.search.tree import Name, Names, Node, Number, Numbers, Place, QueryError, Time
from rankscope_server.text import LEVEL_BOUNDS, LEVELS

Value: TypeAlias = tuple[str, Place]
_STREAMS = (
    *get_args(get_type_hints(schema.LogLine)["stream"]), "event", "error", "finding",
)  # fmt: skip
HELP: dict[str, str] = {
    "rank": "3 or 3-7 or 0,2,4-7; node for lines of no rank",
    "level": "error or error,info or >=warning",
    "step": "400 or 400..500 or >400",
    "attempt": "0 or 0..2",
    "host": "node-b or node-*",
    "logger": "train.data or train.*",
    "stream": f"{', '.join(_STREAMS[:-1])} or {_STREAMS[-1]}",
    "group": "the name of a process group",
    "run": "the id or the name of a run, or ddp-*",
    "project": "the name of a project",
    "since": "-10m, or a time as 2026-01-31T12:00",
    "until": "-10m, or a time as 2026-01-31T12:00",
}
_NAMES = ("host", "logger", "stream", "group", "run", "project")
_MOST = 1 << 62
_RANGE = re.compile(r"(\d{1,18})(?:(?:-|\.\.)(\d{1,18}))?")
_BOUND = re.compile(r"(>=|<=|>|<)(\d{1,18})")
_LEVEL_BOUND = re.compile(r"(>=|<=|>|<)?([A-Za-z]+|\d{1,3})")
_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL", "ERR": "ERROR"}
_AGO = re.compile(r"-?(\d{1,9}(?:\.\d{1,3})?)(ms|s|m|h|d|w)")
_UNIT_NS = {
    "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9,
    "w": 7 * 86_400 * 10**9,
}  # fmt: skip


def read(name: str, values: list[Value], place: Place, now_ns: int) -> Node:
    """Return the node of a filter. Raises QueryError at its name or at one of its values."""
    field = name.lower()
    if field not in HELP:
        raise _unknown(name, place)
    if field == "stream":
        _check_streams(values)
    if field in _NAMES:
        return Names(cast(Name, field), tuple(value for value, _ in values), place)
    if field in ("since", "until"):
        return _time(field, values, place, now_ns)
    ranges = tuple(_range(cast(Number, field), *value) for value in values)
    return Numbers(cast(Number, field), ranges, place)


def level_range(name: str) -> tuple[int, int] | None:
    """Return which levels go by a name; None where it is not known."""
    upper = _ALIASES.get(name.upper(), name.upper())
    if upper not in LEVEL_BOUNDS:
        return None
    place = LEVELS.index(upper)
    return LEVEL_BOUNDS[upper], LEVEL_BOUNDS[LEVELS[place - 1]] - 1 if place else _MOST


def _unknown(name: str, place: Place) -> QueryError:
    near = difflib.get_close_matches(name.lower(), HELP, 1)
    other = f"{near[0]}: is one. " if near else ""
    return QueryError(
        f"{name[:30]}: is not a filter", Place(place.start, place.start + len(name) + 1),
        f"{other}Use {', '.join(HELP)}; put it in quotation marks to search for the text",
    )  # fmt: skip


def _check_streams(values: list[Value]) -> None:
    for value, place in values:
        pattern = re.compile(re.escape(value.lower()).replace(r"\*", ".*"))
        if not any(map(pattern.fullmatch, _STREAMS)):
            near = difflib.get_close_matches(value.lower(), _STREAMS, 1)
            other = f"{near[0]} is one; " if near else ""
            raise QueryError(f"{value[:40]!r} is no stream", place, f"{other}use {HELP['stream']}")


def _range(field: Number, value: str, place: Place) -> tuple[int, int]:
    if field == "level":
        return _level(value, place)
    if field == "rank" and value.lower() in ("node", "-1"):
        return -1, -1
    if found := _RANGE.fullmatch(value):
        lo = int(found[1])
        hi = int(found[2]) if found[2] else lo
        if lo > hi:
            raise _mistake(field, f"{value[:40]} runs backwards", place)
        return lo, hi
    if found := _BOUND.fullmatch(value):
        return _bounded(found[1], int(found[2]), int(found[2]))
    raise _mistake(field, f"{value[:40]!r} is no {field}", place)


def _level(value: str, place: Place) -> tuple[int, int]:
    found = _LEVEL_BOUND.fullmatch(value)
    if found is None:
        raise _mistake("level", f"{value[:40]!r} is no level", place)
    if found[2].isdigit():
        known: tuple[int, int] | None = (int(found[2]), int(found[2]))
    else:
        known = level_range(found[2])
    if known is None:
        names = ", ".join(name.lower() for name in LEVELS)
        raise QueryError(f"{value[:40]!r} is no level", place, f"use {names}, or >=warning")
    return _bounded(found[1], *known) if found[1] else known


def _bounded(sign: str, lo: int, hi: int) -> tuple[int, int]:
    if sign in (">=", ">"):
        return (lo if sign == ">=" else hi + 1), _MOST
    return -_MOST, (hi if sign == "<=" else lo - 1)


def _time(field: str, values: list[Value], place: Place, now_ns: int) -> Time:
    if len(values) > 1:
        raise _mistake(field, "one time is enough", values[1][1])
    time_ns = _read_time(*values[0], field, now_ns)
    if field == "since":
        return Time(time_ns, None, place)
    return Time(None, time_ns, place)


def _read_time(value: str, place: Place, field: str, now_ns: int) -> int:
    if found := _AGO.fullmatch(value):
        return now_ns - int(float(found[1]) * _UNIT_NS[found[2]])
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise _mistake(field, f"{value[:40]!r} is no time", place) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    try:
        return round(time.timestamp() * 1e6) * 1000
    except (OverflowError, OSError):
        raise _mistake(field, f"{value[:40]!r} is out of range", place) from None


def _mistake(field: str, what: str, place: Place) -> QueryError:
    return QueryError(what, place, f"use {field}:{HELP[field]}")
