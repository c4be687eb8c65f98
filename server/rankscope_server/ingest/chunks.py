"""Validates chunks: decoded and checked column by column before a byte of them is stored."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import (
    RANK,
    ChunkError,
    Column,
    OpenChunk,
    chunk_count,
    decode_alike,
    open_chunk,
)
from rankscope.wire.sample_columns import LATER_COLUMNS, SAMPLE_KINDS
from rankscope.wire.schema import (
    CHUNK_COLUMNS,
    FLOAT_COLUMNS,
    MAX_RANK,
    STRING_COLUMNS,
    Chunk,
)
from rankscope_server.call_shapes import ShapedCalls, shapes_of
from rankscope_server.ingest.operations import CallDurations, durations_of
from rankscope_server.ingest.records import (
    MAX_STEP,
    MAX_TIME_NS,
    RefusalError,
    Refused,
    clean_text,
    place_of,
)
from rankscope_server.ingest.step_metrics import BLOCK_STEPS, MAX_BLOCKS_PER_CHUNK, metrics_of_steps

MAX_EVENTS_PER_BATCH = 2_000_000  # a quarter of a gigabyte when decoded
_WORD_LENGTHS = {"group": 256, "call_site": 4_096, "cgroup": 4_096, "device": 256,
                 "interface": 256, "port": 256}  # fmt: skip
_WORD_LENGTH = 64  # of the others
_TIME_COLUMNS = {
    "collectives": "arrived_ns",
    "steps": "started_ns",
    **dict.fromkeys(SAMPLE_KINDS, "time_ns"),
}

_decode = msgspec.msgpack.Decoder(Chunk).decode
Array = np.ndarray[Any, np.dtype[Any]]


class RankSpan(NamedTuple):
    """From when to when a chunk says something of a rank."""

    rank: int
    time_lo_ns: int
    time_hi_ns: int
    step_lo: int
    step_hi: int


@dataclass(frozen=True, slots=True)
class ValidatedChunk:
    """A chunk that can be stored, decoded once, with what its rollups need."""

    chunk: Chunk  # its index fields computed from the columns, whatever the sender gave
    columns: dict[str, Column]  # of several ranks with one more, RANK
    max_duration_ns: int
    ranks: list[int]  # ascending
    begins: Array  # of each rank its first event
    steps: Array | None = None
    values: dict[str, Array] | None = None
    calls: ShapedCalls | None = None
    durations: CallDurations | None = None

    def events_of_ranks(self) -> Iterator[tuple[int, slice]]:
        """Yield each rank with where its events are."""
        begins = self.begins.tolist()
        for rank, begin, end in zip(self.ranks, begins, [*begins[1:], None], strict=True):
            yield rank, slice(begin, end)

    def spans(self) -> list[RankSpan]:
        """Return from when to when the chunk speaks of each rank."""
        chunk, columns = self.chunk, self.columns
        if len(self.ranks) == 1:
            return [
                RankSpan(chunk.rank, chunk.time_lo_ns, chunk.time_hi_ns, chunk.step_lo,
                         chunk.step_hi)
            ]  # fmt: skip
        times, steps = np.asarray(columns[_TIME_COLUMNS[chunk.kind]]), np.asarray(columns["step"])
        ends = times + np.maximum(np.asarray(columns["duration_ns"]), 0)
        least, most, begins = np.minimum.reduceat, np.maximum.reduceat, self.begins
        arrays = (
            least(times, begins), np.minimum(most(ends, begins), MAX_TIME_NS),
            least(steps, begins), most(steps, begins),
        )  # fmt: skip
        rows = zip(self.ranks, *(array.tolist() for array in arrays), strict=True)
        return [RankSpan(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk that was unpacked, with its place in the batch."""

    index: int
    chunk: Chunk
    opened: OpenChunk


def validate_chunks(raw: list[msgspec.Raw]) -> tuple[list[ValidatedChunk], list[Refused]]:
    """Return the chunks that can be stored and the refused ones with the reason.

    Chunks of one form, as ranks of a node send them, are validated together.
    """
    refused: list[Refused] = []
    alike: dict[Hashable, list[_Part]] = {}
    events = 0
    for index, data in enumerate(raw):
        kind: str | None = None
        try:
            chunk = _decode(data)
            kind = chunk.kind
            events += chunk_count(chunk.data)
            if events > MAX_EVENTS_PER_BATCH:
                raise RefusalError(
                    "chunks", f"the batch holds more than {MAX_EVENTS_PER_BATCH} events",
                    "send smaller batches",
                )  # fmt: skip
            opened = _open(chunk)
            alike.setdefault((kind, opened.form), []).append(_Part(index, chunk, opened))
        except Exception as error:  # noqa: BLE001 - what is not a refusal is raised again
            refused.append(_refusal(index, kind, error))
    valid: dict[int, ValidatedChunk] = {}
    for parts in alike.values():
        try:
            valid |= _validated(parts)
        except (RefusalError, ChunkError):  # one of them: each for itself
            for part in parts:
                try:
                    valid |= _validated([part])
                except (RefusalError, ChunkError) as error:
                    refused.append(_refusal(part.index, part.chunk.kind, error))
    refused.sort(key=lambda one: one.index)
    return [valid[index] for index in sorted(valid)], refused


def validate_chunk(chunk: Chunk) -> ValidatedChunk:
    """Return the chunk fit for storing. Raises RefusalError, ChunkError."""
    return _validated([_Part(0, chunk, _open(chunk))])[0]


def _open(chunk: Chunk) -> OpenChunk:
    """Return the chunk unpacked. Raises RefusalError, ChunkError."""
    node_level = chunk.kind in SAMPLE_KINDS
    _within("rank", chunk.rank, schema.NODE_RANK if node_level else 0, MAX_RANK)
    _within("attempt", chunk.attempt, 0, 1 << 20)
    clean_text("host", chunk.host)
    opened = open_chunk(chunk.data)
    if opened.ranks:
        _check_ranks(chunk, opened.ranks)
    if opened.count != chunk.count:
        raise RefusalError(
            "count", f"says {chunk.count}, the data holds {opened.count}", "count again"
        )
    return opened


def _check_ranks(chunk: Chunk, ranks: list[int]) -> None:
    """Raise RefusalError where a chunk of several ranks is not one that it says it is."""
    if chunk.kind in SAMPLE_KINDS:
        raise RefusalError("data", "samples of several ranks", "send a chunk for the node")
    if chunk.rank != ranks[0]:
        raise RefusalError(
            "rank", f"says {chunk.rank}, the data begins with {ranks[0]}", "send the first rank"
        )
    _within("rank", ranks[-1], 0, MAX_RANK)


def _validated(parts: list[_Part]) -> dict[int, ValidatedChunk]:
    """Return chunks of one kind and form, by their place in the batch.

    Raises RefusalError, ChunkError where one of them is not fit.
    """
    kind = parts[0].chunk.kind
    decoded = decode_alike([part.opened for part in parts])
    names = tuple(decoded.rows)
    words = decoded.words[0]  # of one form, they have the same
    _check_columns(kind, names, tuple(words), tuple(decoded.floats))
    _check_words(words)
    columns = decoded.columns()
    for name in CHUNK_COLUMNS[kind]:
        if name not in columns:  # of LATER_COLUMNS
            columns[name] = np.full(decoded.numbers.shape[1], -1)
    limits = _limits(kind, names)
    rows = list(decoded.rows.values())
    lowest, highest = decoded.lowest[rows], decoded.highest[rows]
    wrong = (lowest < limits.least) | (highest > limits.most)
    if wrong.any():
        row = int(np.argmax(wrong.any(axis=1)))
        bounds = int(limits.least[row, 0]), int(limits.most[row, 0])
        _within(names[row], int(lowest[row].min()), *bounds)
        _within(names[row], int(highest[row].max()), *bounds)
    ranges = dict(zip(names, zip(lowest, highest, strict=True), strict=True))
    wanted = {name: columns[name] for name in CHUNK_COLUMNS[kind]}
    if decoded.ranks is not None:
        wanted[RANK] = decoded.ranks
    return _with_rollups(parts, decoded.begins, wanted, ranges)


@lru_cache(maxsize=256)
def _check_columns(
    kind: str, numbers: tuple[str, ...], of_words: tuple[str, ...], floats: tuple[str, ...]
) -> None:
    """Raise RefusalError for a column that is missing or of another type."""
    for name in CHUNK_COLUMNS[kind]:
        if name not in numbers and name not in floats:
            if name in LATER_COLUMNS:
                continue
            raise RefusalError(name, "the column is missing", "send every column of the kind")
        if name in STRING_COLUMNS:
            if name not in of_words:
                raise RefusalError(name, "holds numbers in place of words", "send a dictionary")
        elif name in of_words:
            raise RefusalError(name, "holds words in place of numbers", "send numbers")
        elif name not in FLOAT_COLUMNS and name in floats:
            raise RefusalError(name, "holds fractions in place of whole numbers", "send integers")


def _check_words(words: dict[str, list[str]]) -> None:
    """Raise RefusalError for a bad word."""
    for name, known in words.items():
        limit = _WORD_LENGTHS.get(name, _WORD_LENGTH)
        if name not in STRING_COLUMNS:  # of a newer sender; it is not read
            continue
        if max(map(len, known), default=0) > limit or "\x00" in "".join(known):
            raise RefusalError(
                name, "holds a word that is too long or has NUL", f"use {limit} at most"
            )


class _Limits(NamedTuple):
    """What the numbers of each row may be, rows x 1."""

    least: Array
    most: Array


@lru_cache(maxsize=256)
def _limits(kind: str, names: tuple[str, ...]) -> _Limits:
    least, most = np.full(len(names), -MAX_TIME_NS), np.full(len(names), MAX_TIME_NS)
    for row, name in enumerate(names):
        if name in STRING_COLUMNS or name not in CHUNK_COLUMNS[kind]:  # codes; not ours
            least[row], most[row] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        elif name == _TIME_COLUMNS[kind]:
            least[row] = 0
        elif name == "step":
            least[row], most[row] = 0, MAX_STEP
    return _Limits(least[:, None], most[:, None])


def _with_rollups(
    parts: list[_Part], begins: Array, columns: dict[str, Column],
    ranges: dict[str, tuple[Array, Array]],
) -> dict[int, ValidatedChunk]:  # fmt: skip
    """Return the chunks with what their rollups need; `ranges` are the extremes of each chunk."""
    kind = parts[0].chunk.kind
    times_lo, times_hi = ranges[_TIME_COLUMNS[kind]]
    longest = np.full(len(parts), -1)
    if "duration_ns" in columns:
        ends = np.asarray(columns[_TIME_COLUMNS[kind]]) + np.asarray(columns["duration_ns"])
        times_hi = np.maximum(times_hi, np.maximum.reduceat(ends, begins))
        longest = np.maximum(ranges["duration_ns"][1], 0)
    steps_lo, steps_hi = ranges["step"] if "step" in columns else (np.zeros(len(parts), int),) * 2
    rollups = _Rollups()
    if kind == "collectives":
        same = {name for name, (low, high) in ranges.items() if low.min() == high.max()}
        rollups.calls = shapes_of(columns, same)
        rollups.durations = durations_of(columns, rollups.calls)
    elif kind == "steps":
        _check_steps(np.asarray(columns["step"]), begins, steps_lo, steps_hi)
        rollups.values = metrics_of_steps(columns)
    ends_of = [*begins.tolist()[1:], len(next(iter(columns.values())))]
    numbers = zip(*(
        array.tolist()
        for array in (times_lo, np.minimum(times_hi, MAX_TIME_NS), steps_lo, steps_hi, longest)
    ), strict=True)  # fmt: skip
    found = {}
    for part, begin, end, (time_lo, time_hi, step_lo, step_hi, longest_ns) in zip(
        parts, begins.tolist(), ends_of, numbers, strict=True
    ):
        events = slice(begin, end)
        chunk = msgspec.structs.replace(
            part.chunk, time_lo_ns=time_lo, time_hi_ns=time_hi, step_lo=step_lo, step_hi=step_hi
        )
        mine = {name: column[events] for name, column in columns.items()}
        found[part.index] = ValidatedChunk(
            chunk,
            mine,
            longest_ns,
            ranks=part.opened.ranks or [chunk.rank],
            begins=np.cumsum([0, *part.opened.counts[:-1]]),
            steps=np.asarray(mine["step"]) if rollups.values is not None else None,
            values=rollups.values and {n: cells[events] for n, cells in rollups.values.items()},
            calls=rollups.calls and rollups.calls.part(events),
            durations=rollups.durations and rollups.durations.part(events),
        )
    return found


@dataclass(slots=True)
class _Rollups:
    """What rollups need of some chunks together."""

    values: dict[str, Array] | None = None
    calls: ShapedCalls | None = None
    durations: CallDurations | None = None


def _check_steps(steps: Array, begins: Array, steps_lo: Array, steps_hi: Array) -> None:
    """Raise RefusalError for a step that is none, or for steps that are too far apart."""
    _within("step", int(steps_lo.min()), 1, MAX_STEP)
    for place in np.flatnonzero((steps_hi - steps_lo) // BLOCK_STEPS >= MAX_BLOCKS_PER_CHUNK):
        blocks = np.split(steps, begins[1:])[place] // BLOCK_STEPS
        if len(np.unique(blocks)) > MAX_BLOCKS_PER_CHUNK:
            raise RefusalError("step", "the steps are too far apart", "send steps in their order")


def _within(field: str, value: int, lo: int, hi: int) -> None:
    if not lo <= value <= hi:
        raise RefusalError(field, f"{value} is outside {lo}..{hi}", "send a value in this range")


def _refusal(index: int, kind: str | None, error: Exception) -> Refused:
    """Return why a chunk is refused. Raises what is no refusal again."""
    if isinstance(error, RefusalError):
        field, reason, remedy = error.field, error.reason, error.remedy
    elif isinstance(error, ChunkError):
        field, reason, remedy = "data", str(error), "encode the chunk again"
    elif isinstance(error, msgspec.MsgspecError | ValueError | RecursionError):
        field, reason = place_of(error) or "chunk", str(error)[:300]
        remedy = "update the server" if field == "kind" else "send it as the schema says"
    else:
        raise error
    return Refused(index=index, kind=kind, field=field, reason=reason, remedy=remedy, part="chunks")
