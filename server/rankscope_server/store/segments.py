"""Segments: many chunks of one run and kind as one Parquet file, which any engine reads.

A file has a row group for each chunk that takes their place: events of ranks of one host and one
block of ranks, by rank, step and sequence. Its columns are those of docs/data.md, what is not known
is null; times are microseconds, as chunks have them. Version 1.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from rankscope.wire.chunk import (
    NS_PER_UNIT,
    RANK,
    ChunkError,
    Column,
    Words,
    by_rank,
    encode_chunk,
    encode_ranks,
)
from rankscope.wire.schema import CHUNK_COLUMNS, STATES, STRING_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
SegmentKind: TypeAlias = Literal["collectives", "steps"]
KINDS: tuple[SegmentKind, ...] = get_args(SegmentKind)  # nearly all bytes
ORDER = {"collectives": ("step", "sequence"), "steps": ("step", "started_ns")}  # of a rank's events
ZSTD_LEVEL = 9
_NS, _US = "_ns", "_us"
# Each value is near the one before it. Other times are spread: their bytes are put side by side.
_DELTAS = frozenset({"arrived_us", "step"})
_WALL_CLOCK = {"collectives": "arrived_us", "steps": "started_us"}
_FOOTER_END = 8  # bytes: its length, and the magic


class Source(NamedTuple):
    """Events of one rank group: who they are of, and their columns as a chunk has them."""

    attempt: int
    host: str
    columns: Mapping[str, Column]  # with the rank of each event


class Range(NamedTuple):
    """Bytes of a file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Written:
    """A file, with what of it each of its row groups takes, and its footer."""

    data: bytes
    groups: list[Range]
    footer: Range


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group that was read, with the footer of its file."""

    number: int
    parts: tuple[tuple[int, bytes], ...]  # from which byte on, what

    def columns(self, only: Collection[str] | None = None) -> dict[str, Column]:
        """Return columns as `decode_chunk` does, with the rank of each. Raises ChunkError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = bytearray(max(start + len(data) for start, data in self.parts))
        for start, data in self.parts:
            file[start : start + len(data)] = data
        try:
            opened = pq.ParquetFile(pa.BufferReader(file))
            kind = opened.schema_arrow.metadata[b"rankscope.kind"].decode()
            names = {RANK: "rank"} | {name: _name_of(name) for name in CHUNK_COLUMNS[kind]}
            wanted = {n: column for n, column in names.items() if only is None or n in only}
            table = opened.read_row_group(self.number, list(wanted.values()))
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ChunkError(f"segment: {error}") from error
        return {name: _column_of(name, table[column]) for name, column in wanted.items()}

    def chunk(self) -> bytes:
        """Return the events as a chunk. Raises ChunkError."""
        of_ranks = dict(by_rank(-1, self.columns()))
        return encode_ranks(of_ranks) if len(of_ranks) > 1 else encode_chunk(*of_ranks.values())


def sorted_columns(kind: str, columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return events by rank, and of a rank in the order of a segment; equal ones as they were."""
    keys = [np.asarray(columns[name]) for name in (RANK, *ORDER[kind])]
    order = np.lexsort(keys[::-1])
    return {
        name: Words(column.codes[order], column.words)
        if isinstance(column, Words)
        else np.asarray(column)[order]
        for name, column in columns.items()
    }


def is_exact(columns: Mapping[str, Column]) -> bool:
    """Return whether a segment has these times as they are: whole microseconds, or not known."""
    times = (np.asarray(column) for name, column in columns.items() if name.endswith(_NS))
    return all(bool(((one % NS_PER_UNIT == 0) | (one == -1)).all()) for one in times)


def write(kind: str, run_id: str, sources: Sequence[Source]) -> Written:
    """Return the file of some groups of events, each of which `sorted_columns` has in order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(kind, run_id)
    spread = [n for n in schema.names if (n.endswith(_US) or n == "sequence") and n not in _DELTAS]
    file = io.BytesIO()
    with pq.ParquetWriter(
        file, schema, compression="zstd", compression_level=ZSTD_LEVEL,
        use_dictionary=[n for n in schema.names if n not in _DELTAS and n not in spread],
        column_encoding=dict.fromkeys(_DELTAS & {*schema.names}, "DELTA_BINARY_PACKED")
        | dict.fromkeys(spread, "BYTE_STREAM_SPLIT"),
    ) as writer:  # fmt: skip
        for source in sources:
            arrays = [_array_of(kind, field, source) for field in schema]
            table = pa.table(arrays, schema=schema)
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
    data = file.getvalue()
    metadata = pq.read_metadata(pa.BufferReader(data))
    groups = [_range_of(metadata.row_group(at)) for at in range(metadata.num_row_groups)]
    footer_bytes = int.from_bytes(data[-_FOOTER_END:-4], "little")
    return Written(data, groups, Range(len(data) - footer_bytes - _FOOTER_END, len(data)))


def _schema(kind: str, run_id: str) -> pa.Schema:
    import pyarrow as pa

    words = pa.dictionary(pa.int32(), pa.string())
    types = {"attempt": pa.int32(), "rank": pa.int32(), "host": words, "state": words}
    types |= dict.fromkeys(STRING_COLUMNS, words)
    names = ["attempt", "rank", "host", *map(_name_of, CHUNK_COLUMNS[kind])]
    said = {"rankscope.kind": kind, "rankscope.version": str(VERSION), "rankscope.run": run_id}
    return pa.schema([(name, types.get(name, pa.int64())) for name in names], said)


def _name_of(name: str) -> str:
    """Return the name of a column of a chunk in a segment."""
    return name.removesuffix(_NS) + _US if name.endswith(_NS) else name


def _array_of(kind: str, field: pa.Field, source: Source) -> pa.Array:
    import pyarrow as pa

    ranks = np.asarray(source.columns[RANK])
    if field.name == "attempt":
        return pa.array(np.full(len(ranks), source.attempt, np.int32))
    if field.name == "rank":
        return pa.array(ranks.astype(np.int32))
    if field.name == "host":
        return _words(Words(np.zeros(len(ranks), np.int64), [source.host]))
    is_time = field.name.endswith(_US)
    name = field.name.removesuffix(_US) + _NS if is_time else field.name
    column = source.columns.get(name)
    if column is None:
        return pa.nulls(len(ranks), field.type)
    if pa.types.is_dictionary(field.type):
        if name == "state":
            codes = np.clip(np.asarray(column), 0, len(STATES) - 1)
            return _words(Words(codes, list(STATES)))
        return _words(Words.of(column))
    values = np.asarray(column)
    if is_time and field.name != _WALL_CLOCK[kind]:
        return pa.array(values // NS_PER_UNIT, field.type, mask=values < 0)
    if is_time:
        return pa.array(values // NS_PER_UNIT, field.type)
    is_null = values < 0 if name == "peer_rank" else values == 0 if name == "sequence" else None
    return pa.array(values, field.type, mask=is_null)


def _words(column: Words) -> pa.Array:
    import pyarrow as pa

    blank = np.array([not word for word in column.words], bool)
    codes = column.codes.astype(np.int32)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes, pa.int32(), mask=blank[codes]), pa.array(column.words, pa.string())
    )


def _column_of(name: str, stored: pa.ChunkedArray) -> Column:
    import pyarrow as pa
    import pyarrow.compute as pc

    if name in STRING_COLUMNS or name == "state":
        array = stored.combine_chunks()
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        words = [*array.dictionary.to_pylist(), ""]  # the last is of null
        codes = pc.fill_null(array.indices, len(words) - 1).to_numpy().astype(np.int64)
        if name == "state":
            numbers = [STATES.index(word or STATES[0]) for word in words]
            states: Column = np.array(numbers, np.int64)[codes]
            return states
        return Words(codes, words)
    unknown = 0 if name == "sequence" else -1
    values: np.ndarray[Any, np.dtype[Any]] = (
        pc.fill_null(stored, unknown).to_numpy().astype(np.int64)
    )
    in_ns: Column = np.where(values < 0, -1, values * NS_PER_UNIT)
    return in_ns if name.endswith(_NS) else values


def _range_of(group: Any) -> Range:
    """Return where the columns of a row group are."""
    starts, ends = [], []
    for at in range(group.num_columns):
        column = group.column(at)
        start = column.dictionary_page_offset or column.data_page_offset
        starts.append(start)
        ends.append(start + column.total_compressed_size)
    return Range(min(starts), max(ends))
