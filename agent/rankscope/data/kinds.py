"""The tables of a run: their columns and types, the same in Python, SQL and exported files.

What is not known is null in all of them. The wire says -1, an empty word, or a sequence of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from rankscope.wire import stored
from rankscope.wire.sample_columns import SAMPLE_COLUMNS
from rankscope.wire.schema import (
    CHUNK_COLUMNS,
    FLOAT_COLUMNS,
    STRING_COLUMNS,
)

KINDS = stored.KINDS
Range = tuple[int, int]
Progress = Callable[[int, int | None], None]  # events read by now, and of how many
_WORDS = pa.dictionary(pa.int32(), pa.string())
# wall clock, which is always known; every other column of nanoseconds may not be
WALL_CLOCK = frozenset({"arrived_ns", "time_ns"})
_STATE = "state"  # a number on the wire, a word here
_TEXTS = frozenset({
    "host", "role", "backend", "schedule", "end_reason", "end_detail", "group", "ranks",
    "description", "facts", "name", "fields", "type", "message", "traceback", "place",
    "fingerprint", "key", "state", "body", "source", "reason", "level", "logger", "stream",
})  # fmt: skip
LOG_COLUMNS: tuple[str, ...] = (
    "id", "attempt", "rank", "host", "time_ns", "step", "level", "logger", "stream", "message",
    "fields",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Which rows of a table are wanted; both ends of ranges included, None and () mean all.

    Ranks and steps narrow what is fetched of collectives and steps; an attempt that of all samples
    too. Tables of rows are small, and whole.
    """

    steps: Range | None = None
    ranks: Sequence[Range] = ()
    attempt: int | None = None

    @property
    def query(self) -> dict[str, Any]:
        """Return it as the server is asked for it."""
        asked: dict[str, Any] = {}
        if self.steps is not None:
            asked |= {"from": self.steps[0], "to": self.steps[1]}
        if self.ranks:
            asked["ranks"] = ",".join(f"{lo}-{hi}" for lo, hi in self.ranks)
        if self.attempt is not None:
            asked["attempt"] = self.attempt
        return asked


EVERYTHING = Part()


class DataError(Exception):
    """A table cannot be had; the message says why and what to do."""


@cache
def schema_of(kind: str) -> pa.Schema:
    """Return the columns of a table. Raises DataError for a name that is none."""
    if kind in CHUNK_COLUMNS:
        # who: of machines the host says all, where they do not say the rank themselves
        who = ("attempt", "host") if kind in SAMPLE_COLUMNS else ("attempt", "rank", "host")
        columns: Sequence[str] = (*who, *CHUNK_COLUMNS[kind])
        return pa.schema([(name, _type_in_chunk(kind, name)) for name in columns])
    if kind in stored.ROW_COLUMNS:
        columns = stored.ROW_COLUMNS[kind]
    elif kind == stored.LOGS:
        columns = LOG_COLUMNS
    else:
        raise DataError(f"there is no table {kind!r}; there are {', '.join(KINDS)}")
    return pa.schema([(name, _type_in_row(name)) for name in columns])


def may_be_unknown(kind: str, name: str) -> bool:
    """Return whether -1 means "not known" in a column of numbers of a chunk."""
    if kind in SAMPLE_COLUMNS:
        return name not in ("time_ns", "interval_ns")
    if kind == "steps" and name == "started_ns":
        return False
    return (name.endswith("_ns") and name not in WALL_CLOCK) or name == "peer_rank"


def _type_in_chunk(kind: str, name: str) -> pa.DataType:
    if name in STRING_COLUMNS or name == "host" or (kind, name) == ("collectives", _STATE):
        return _WORDS
    if name in ("attempt", "rank"):
        return pa.int32()
    return pa.float32() if name in FLOAT_COLUMNS else pa.int64()


def _type_in_row(name: str) -> pa.DataType:
    if name == "value":
        return pa.float64()
    return pa.string() if name in _TEXTS else pa.int64()
