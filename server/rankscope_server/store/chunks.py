"""Chunks as rows: written with their data kept first, read many at once.

What cannot be read, as it is missing or damaged, is left out and counted; an answer says how many
(`Unread`).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope.wire.chunk import ChunkError, Column, decode_chunks
from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope_server.store import tables
from rankscope_server.store.blobs import Place, blobs_of
from rankscope_server.store.segments import RowGroup

log = logging.getLogger(__name__)
READ_CHUNKS = 256  # at a time; SQLite bounds the number of parameters
_TABLE = tables.chunk.c
# What a query of chunks selects to read their data.
PLACE = (
    _TABLE.data, _TABLE.object, _TABLE.start, _TABLE.num_bytes, _TABLE.crc32, _TABLE.row_group,
)  # fmt: skip
_UNREAD = "unread"
_OTHER_LETTERS = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_NAME = 48


@dataclass(slots=True)
class Unread:
    """Counts the chunks that one answer lacks."""

    count: int = 0


def counting(connection: sa.Connection) -> Unread:
    """Return what counts the chunks that this connection finds missing or damaged."""
    unread = Unread()
    connection.execution_options(**{_UNREAD: unread})
    return unread


def insert_chunks(connection: sa.Connection, run_id: str, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows, each with its `data`, which is kept before. Raises StoreUnavailableError."""
    run = folder_of(run_id)
    places = blobs_of(connection).put(
        [(f"{run}/{_kind_of(row['kind'])}", row["data"]) for row in rows]
    )
    found = [row | place._asdict() for row, place in zip(rows, places, strict=True)]
    connection.execute(sa.insert(tables.chunk), found)


def data_of(connection: sa.Connection, rows: Sequence[Any]) -> Iterator[tuple[Any, bytes]]:
    """Yield rows, which have the columns `PLACE`, with their data as chunks; in their order.

    Raises StoreUnavailableError where it cannot be read now.
    """
    for at in range(0, len(rows), READ_CHUNKS):
        for row, data in _there(connection, rows[at : at + READ_CHUNKS]):
            try:
                yield row, data if isinstance(data, bytes) else data.chunk()
            except ChunkError as error:
                left_out(connection, str(error))


def decoded(
    connection: sa.Connection, rows: Sequence[Any], only: Collection[str] | None = None
) -> Iterator[tuple[Any, dict[str, Column]]]:
    """Yield rows, which have the columns `PLACE`, with the columns of their chunks; in their order.

    Raises StoreUnavailableError where they cannot be read now.
    """
    for at in range(0, len(rows), READ_CHUNKS):
        there = _there(connection, rows[at : at + READ_CHUNKS])
        chunks = _decoded([data for _, data in there if isinstance(data, bytes)], only)
        for row, data in there:
            try:
                found = next(chunks) if isinstance(data, bytes) else data.columns(only)
            except ChunkError as error:
                found = error
            if isinstance(found, ChunkError):
                left_out(connection, str(found))
            else:
                yield row, found


def _decoded(
    chunks: Sequence[bytes], only: Collection[str] | None
) -> Iterator[dict[str, Column] | ChunkError]:
    """Yield the columns of each chunk, or what is wrong with it."""
    done = 0
    try:
        for columns in decode_chunks(chunks, only):
            done += 1
            yield columns
    except ChunkError:  # of one of those that were to be decoded together
        for data in chunks[done:]:
            try:
                (columns,) = decode_chunks([data], only)
            except ChunkError as error:
                yield error
            else:
                yield columns


def _there(connection: sa.Connection, rows: Sequence[Any]) -> list[tuple[Any, bytes | RowGroup]]:
    """Return those rows whose data is there and whole, with it; of others it is counted."""
    footers = _footers(connection, {row.object for row in rows if row.row_group >= 0})
    places = [Place(row.data, row.object, row.start, row.num_bytes, row.crc32) for row in rows]
    found = blobs_of(connection).get([*places, *footers.values()])
    read = dict(zip(footers, found[len(rows) :], strict=True))
    there: list[tuple[Any, bytes | RowGroup]] = []
    for row, data in zip(rows, found[: len(rows)], strict=True):
        footer = read.get(row.object)
        if data is None or (row.row_group >= 0 and footer is None):
            left_out(connection, f"{row.num_bytes} bytes of an object")
        elif footer is None:
            there.append((row, data))
        else:
            start = footers[row.object].start
            there.append((row, RowGroup(row.row_group, ((row.start, data), (start, footer)))))
    return there


def _footers(connection: sa.Connection, objects: set[str]) -> dict[str, Place]:
    """Return where the footers of segments are."""
    table = tables.segment.c
    if not objects:
        return {}
    rows = connection.execute(
        sa.select(table.object, table.footer_start, table.num_bytes, table.footer_crc32).where(
            table.object.in_(objects)
        )
    )
    return {
        row.object: Place(
            b"", row.object, row.footer_start, row.num_bytes - row.footer_start, row.footer_crc32
        )
        for row in rows
    }


def left_out(connection: sa.Connection, why: str) -> None:
    """Count a chunk that cannot be read."""
    unread = connection.get_execution_options().get(_UNREAD)
    if unread is None:  # for no answer
        log.warning("the data of a chunk is missing or damaged: %s", why)
    else:
        unread.count += 1


def _kind_of(kind: str) -> str:
    """Return what retention removes together."""
    return "samples" if kind in SAMPLE_KINDS else kind


def folder_of(run_id: str) -> str:
    """Return the folder of a run: its name as far as letters allow, and that of no other."""
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:12]
    return f"{_OTHER_LETTERS.sub('_', run_id)[:_MAX_NAME]}-{digest}"
