"""Validates chunks: decoded and checked column by column before a byte of them is stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import ChunkError, Column, chunk_count, decode_together
from rankscope.wire.sample_columns import LATER_COLUMNS, SAMPLE_KINDS
from rankscope.wire.schema import CHUNK_COLUMNS, FLOAT_COLUMNS, STRING_COLUMNS, Chunk
from rankscope_server.call_shapes import ShapedCalls, shapes_of
from rankscope_server.ingest.operations import CallDurations, durations_of
from rankscope_server.ingest.records import (
    MAX_RANK,
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


@dataclass(frozen=True, slots=True)
class ValidatedChunk:
    """A chunk that can be stored, decoded once, with what its rollups need."""

    chunk: Chunk  # its index fields computed from the columns, whatever the sender gave
    columns: dict[str, Column]
    max_duration_ns: int
    steps: Array | None = None
    values: dict[str, Array] | None = None
    calls: ShapedCalls | None = None
    durations: CallDurations | None = None


def validate_chunks(raw: list[msgspec.Raw]) -> tuple[list[ValidatedChunk], list[Refused]]:
    """Return the chunks that can be stored and the refused ones with the reason."""
    valid: list[ValidatedChunk] = []
    refused: list[Refused] = []
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
            valid.append(validate_chunk(chunk))
        except RefusalError as error:
            refused.append(_refused(index, kind, error.field, error.reason, error.remedy))
        except ChunkError as error:
            refused.append(_refused(index, kind, "data", str(error), "encode the chunk again"))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            field = place_of(error) or "chunk"
            remedy = "update the server" if field == "kind" else "send it as the schema says"
            refused.append(_refused(index, kind, field, str(error)[:300], remedy))
    return valid, refused


def validate_chunk(chunk: Chunk) -> ValidatedChunk:
    """Return the chunk fit for storing. Raises RefusalError, ChunkError."""
    node_level = chunk.kind in SAMPLE_KINDS
    _within("rank", chunk.rank, schema.NODE_RANK if node_level else 0, MAX_RANK)
    _within("attempt", chunk.attempt, 0, 1 << 20)
    clean_text("host", chunk.host)
    decoded = decode_together(chunk.data)
    count = decoded.count
    if count != chunk.count:
        raise RefusalError("count", f"says {chunk.count}, the data holds {count}", "count again")
    names, of_words = tuple(decoded.rows), tuple(decoded.words)
    _check_columns(chunk.kind, names, of_words, tuple(decoded.floats))
    _check_words(decoded.words)
    columns = decoded.columns()
    for name in CHUNK_COLUMNS[chunk.kind]:
        if name not in columns:  # of LATER_COLUMNS
            columns[name] = np.full(count, -1)
    limits = _limits(chunk.kind, names)
    rows = list(decoded.rows.values())
    lowest, highest = decoded.lowest[rows], decoded.highest[rows]
    wrong = (lowest < limits.least) | (highest > limits.most)
    if wrong.any():
        row = int(np.argmax(wrong))
        bounds = int(limits.least[row]), int(limits.most[row])
        _within(names[row], int(lowest[row]), *bounds)
        _within(names[row], int(highest[row]), *bounds)
    ranges = dict(zip(names, zip(lowest.tolist(), highest.tolist(), strict=True), strict=True))
    return _with_rollups(chunk, {name: columns[name] for name in CHUNK_COLUMNS[chunk.kind]}, ranges)


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
        if name not in STRING_COLUMNS:  # of a newer sender; nobody reads it
            continue
        if max(map(len, known), default=0) > limit or "\x00" in "".join(known):
            raise RefusalError(
                name, "holds a word that is too long or has NUL", f"use {limit} at most"
            )


class _Limits(NamedTuple):
    """What the numbers of each row may be."""

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
    return _Limits(least, most)


def _with_rollups(
    chunk: Chunk, columns: dict[str, Column], ranges: dict[str, tuple[int, int]]
) -> ValidatedChunk:
    """Return the chunk with what its rollups need; `ranges` are the extremes of its numbers."""
    time_lo_ns, time_hi_ns = ranges[_TIME_COLUMNS[chunk.kind]]
    longest_ns = ranges["duration_ns"][1] if "duration_ns" in columns else -1
    if longest_ns > 0:
        times = np.asarray(columns[_TIME_COLUMNS[chunk.kind]])
        ends_ns = int((times + np.asarray(columns["duration_ns"])).max())
        time_hi_ns = max(time_hi_ns, ends_ns)
    step_lo, step_hi = ranges["step"] if "step" in columns else (0, 0)
    chunk = msgspec.structs.replace(
        chunk,
        time_lo_ns=time_lo_ns,
        time_hi_ns=min(time_hi_ns, MAX_TIME_NS),
        step_lo=step_lo,
        step_hi=step_hi,
    )
    if "duration_ns" in columns:
        longest_ns = max(longest_ns, 0)
    if chunk.kind == "collectives":
        calls = shapes_of(columns, {name for name, (low, high) in ranges.items() if low == high})
        return ValidatedChunk(
            chunk, columns, longest_ns, calls=calls, durations=durations_of(columns, calls)
        )
    if chunk.kind != "steps":
        return ValidatedChunk(chunk, columns, longest_ns)
    _within("step", step_lo, 1, MAX_STEP)
    steps = np.asarray(columns["step"])
    if (step_hi - step_lo) // BLOCK_STEPS >= MAX_BLOCKS_PER_CHUNK and (
        len(np.unique(steps // BLOCK_STEPS)) > MAX_BLOCKS_PER_CHUNK
    ):
        raise RefusalError("step", "the steps are too far apart", "send steps in their order")
    return ValidatedChunk(chunk, columns, longest_ns, steps=steps, values=metrics_of_steps(columns))


def _within(field: str, value: int, lo: int, hi: int) -> None:
    if not lo <= value <= hi:
        raise RefusalError(field, f"{value} is outside {lo}..{hi}", "send a value in this range")


def _refused(index: int, kind: str | None, field: str, reason: str, remedy: str) -> Refused:
    return Refused(index=index, kind=kind, field=field, reason=reason, remedy=remedy, part="chunks")
