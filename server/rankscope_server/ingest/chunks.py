"""Validates chunks: decoded and checked column by column before a byte of them is stored."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
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
from rankscope_server.ingest.operations import MAX_SIZES, CallDurations, durations_of
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
_EVENTS_AT_ONCE = 1 << 15
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


class _ApartError(Exception):
    """Chunks that have to be validated each for itself."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk that was unpacked, with its place: its batch, and where in that."""

    place: tuple[int, int]
    chunk: Chunk
    opened: OpenChunk


class ReadChunks:
    """The chunks of one batch, not unpacked yet; what is none is refused already."""

    def __init__(self, raw: Sequence[msgspec.Raw], run_id: str = "") -> None:
        self.run_id = run_id
        self.num_events = 0
        self.chunks: list[tuple[int, Chunk]] = []  # with their places in the batch
        self.refused: list[Refused] = []
        for index, data in enumerate(raw):
            kind: str | None = None
            try:
                chunk = _decode(data)
                kind = chunk.kind
                self.num_events += chunk_count(chunk.data)
                if self.num_events > MAX_EVENTS_PER_BATCH:
                    raise RefusalError(
                        "chunks", f"the batch holds more than {MAX_EVENTS_PER_BATCH} events",
                        "send smaller batches",
                    )  # fmt: skip
                self.chunks.append((index, chunk))
            except Exception as error:  # noqa: BLE001 - what is not a refusal is raised again
                self.refused.append(_refusal(index, kind, error))


def validate_chunks(
    batches: Sequence[ReadChunks],
) -> list[tuple[list[ValidatedChunk], list[Refused]]]:
    """Return of each batch the chunks that can be stored, and the refused ones with the reason.

    Chunks of one form, as ranks of a job send them, are validated together.
    """
    valid: dict[tuple[int, int], ValidatedChunk] = {}
    for parts in _alike(batches):
        try:
            valid |= _validated(parts)
        except (RefusalError, ChunkError, _ApartError):  # one of them: each for itself
            for part in parts:
                try:
                    valid |= _validated([part])
                except (RefusalError, ChunkError) as error:
                    at, index = part.place
                    batches[at].refused.append(_refusal(index, part.chunk.kind, error))
    found = []
    for number, batch in enumerate(batches):
        batch.refused.sort(key=lambda one: one.index)
        places = [(number, index) for index, _ in batch.chunks]
        found.append(([valid[place] for place in places if place in valid], batch.refused))
    return found


def _alike(batches: Sequence[ReadChunks]) -> Iterator[list[_Part]]:
    """Yield chunks of one form and run, some at a time, that stay near the processor."""
    waiting: dict[Hashable, list[_Part]] = {}
    num_events: dict[Hashable, int] = {}
    for number, batch in enumerate(batches):
        for index, chunk in batch.chunks:
            try:
                opened = _open(chunk)
            except Exception as error:  # noqa: BLE001 - what is not a refusal is raised again
                batch.refused.append(_refusal(index, chunk.kind, error))
                continue
            key = (batch.run_id, chunk.attempt, chunk.kind, opened.form)
            waiting.setdefault(key, []).append(_Part((number, index), chunk, opened))
            num_events[key] = num_events.get(key, 0) + opened.count
            if num_events[key] >= _EVENTS_AT_ONCE:
                num_events[key] = 0
                yield waiting.pop(key)
    yield from waiting.values()


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


def _validated(parts: list[_Part]) -> dict[tuple[int, int], ValidatedChunk]:
    """Return chunks of one run, attempt, kind and form, by their place.

    Raises RefusalError, ChunkError where one of them is not fit, _ApartError where they cannot be
    validated together.
    """
    kind = parts[0].chunk.kind
    decoded = decode_alike([part.opened for part in parts])
    names = tuple(decoded.rows)
    _check_columns(kind, names, tuple(decoded.words[0]), tuple(decoded.floats))
    words = decoded.words_in_common()
    _check_words({name: column.words for name, column in words.items()})
    columns = decoded.columns(words)
    later = {
        name: np.full(decoded.num_events, -1)
        for name in CHUNK_COLUMNS[kind]
        if name not in columns  # of LATER_COLUMNS
    }
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
    # of several lists of words a number means several of them
    mixed = {name for name, known in decoded.words[0].items() if words[name].words is not known}
    rollups = _rollups_of(kind, columns | later, ranges, decoded.begins, mixed)
    wanted = [*CHUNK_COLUMNS[kind], *([] if decoded.ranks is None else [RANK])]
    ends = [*decoded.begins.tolist()[1:], decoded.num_events]
    found = {}
    for number, (part, begin, end) in enumerate(
        zip(parts, decoded.begins.tolist(), ends, strict=True)
    ):
        events = slice(begin, end)
        mine = decoded.part(number) | {name: column[events] for name, column in later.items()}
        wanted_columns = {name: mine[name] for name in wanted}
        found[part.place] = rollups.of(number, part, events, wanted_columns)
    return found


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


@dataclass(frozen=True, slots=True)
class _Rollups:
    """What rollups need of some chunks together; lists have an entry for each chunk."""

    times_ns: list[tuple[int, int]]
    steps: list[tuple[int, int]]
    longest_ns: list[int]
    values: dict[str, Array] | None = None
    calls: ShapedCalls | None = None
    durations: CallDurations | None = None

    def of(
        self, number: int, part: _Part, events: slice, columns: dict[str, Column]
    ) -> ValidatedChunk:
        """Return one of the chunks with what its rollups need."""
        (time_lo, time_hi), (step_lo, step_hi) = self.times_ns[number], self.steps[number]
        chunk = msgspec.structs.replace(
            part.chunk, time_lo_ns=time_lo, time_hi_ns=time_hi, step_lo=step_lo, step_hi=step_hi
        )
        return ValidatedChunk(
            chunk,
            columns,
            self.longest_ns[number],
            ranks=part.opened.ranks or [chunk.rank],
            begins=np.cumsum([0, *part.opened.counts[:-1]]),
            steps=np.asarray(columns["step"]) if self.values is not None else None,
            values=self.values and {name: cells[events] for name, cells in self.values.items()},
            calls=self.calls and self.calls.part(events),
            durations=self.durations and self.durations.part(events),
        )


def _rollups_of(
    kind: str, columns: dict[str, Column], ranges: dict[str, tuple[Array, Array]], begins: Array,
    mixed: set[str],
) -> _Rollups:  # fmt: skip
    """Return what rollups need; `ranges` are the extremes of each chunk, not of columns `mixed`.

    Raises RefusalError for steps that are none, _ApartError where one chunk changes another's.
    """
    num = len(begins)
    times_lo, times_hi = ranges[_TIME_COLUMNS[kind]]
    longest = np.full(num, -1)
    if "duration_ns" in columns:
        ends = np.asarray(columns[_TIME_COLUMNS[kind]]) + np.asarray(columns["duration_ns"])
        times_hi = np.maximum(times_hi, np.maximum.reduceat(ends, begins))
        longest = np.maximum(ranges["duration_ns"][1], 0)
    steps_lo, steps_hi = ranges["step"] if "step" in columns else (np.zeros(num, int),) * 2
    values = calls = durations = None
    if kind == "collectives":
        same = {name for name, (low, high) in ranges.items() if low.min() == high.max()}
        calls = shapes_of(columns, same - mixed, begins)
        if num > 1 and len({shape.size_bytes for shape in calls.shapes}) > MAX_SIZES:
            raise _ApartError  # they would be put into doublings, however few one has
        durations = durations_of(columns, calls)
    elif kind == "steps":
        _check_steps(np.asarray(columns["step"]), begins, steps_lo, steps_hi)
        values = metrics_of_steps(columns)
    return _Rollups(
        list(zip(times_lo.tolist(), np.minimum(times_hi, MAX_TIME_NS).tolist(), strict=True)),
        list(zip(steps_lo.tolist(), steps_hi.tolist(), strict=True)),
        longest.tolist(), values, calls, durations,
    )  # fmt: skip


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
