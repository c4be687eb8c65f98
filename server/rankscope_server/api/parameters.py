"""Query parameters that several routes take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import Query

from rankscope.wire.schema import MAX_RANK
from rankscope_server.problems import Problem

MAX_STEP = 1 << 48
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)
MAX_COLUMNS = 4_096
From = Annotated[int | None, Query(alias="from", ge=0, le=MAX_STEP)]
To = Annotated[int | None, Query(alias="to", ge=0, le=MAX_STEP)]
Milliseconds = Annotated[float | None, Query(ge=0, le=4e12, allow_inf_nan=False)]
Rank = Annotated[int | None, Query(ge=0, le=MAX_RANK)]
Attempt = Annotated[int | None, Query(ge=0, le=1 << 20)]
Width = Annotated[int, Query(ge=1, le=MAX_COLUMNS)]


def one_of(words: Iterable[str]) -> Any:
    """Return a parameter that OpenAPI knows the words of; who reads it says what is wrong."""
    return Query(json_schema_extra={"enum": list(words)})


def to_ns(ms: float | None) -> int | None:
    """Return the nanoseconds of a time."""
    return None if ms is None else int(ms * 1e6)


def items(text: str) -> list[str]:
    """Return the items of a list that commas separate; NUL as it is stored, shown."""
    text = text.replace("\x00", "\N{SYMBOL FOR NULL}")
    return [item.strip() for item in text.split(",") if item.strip()]


def ranks_of(texts: list[str], field: str = "ranks") -> list[int]:
    """Return the ranks of a list such as "17,3". Raises Problem 422."""
    if not all(text.isdecimal() and text.isascii() and int(text) <= MAX_RANK for text in texts):
        shown = ",".join(texts)[:40]
        raise Problem(422, f"{shown!r} is no list of ranks", field, "give them as in 17,3")
    return [int(text) for text in texts]


def rank_ranges(text: str) -> list[tuple[int, int]]:
    """Return the first and last rank of each part of "0-63,70". Raises Problem 422."""
    found = []
    for part in items(text):
        match = _RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high <= MAX_RANK:
            raise Problem(422, f"{part[:40]!r} is no range of ranks", "ranks", "write 0-63,70")
        found.append((low, high))
    if not found:
        raise Problem(422, "no ranks are given", "ranks", "write 0-63,70")
    return found
