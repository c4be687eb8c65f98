"""Log lines in compressed blocks: 35 bytes a line instead of 240 as rows with an index.

A block has a head (time, level, rank, host, logger, stream: what filters and counts need) and a
body (messages and fields). A block takes lines until it is full; then it is sealed and its
distinct words go into the full-text index as trigrams. The index only says which blocks may hold
a text; the block itself is searched for the rest, so any substring of any word is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.packing import pack, unpack

LINES_PER_BLOCK = 512
MAX_BODY_CHARS = 1 << 20
INDEX_TABLE = "log_index"  # SQLite FTS5, made by the migrations; other databases scan

Array = np.ndarray[Any, np.dtype[Any]]


class Line(NamedTuple):
    """One line as it is stored."""

    time_ns: int
    level: int
    attempt: int
    rank: int
    step: int
    host: str
    logger: str
    stream: str
    message: str
    fields: dict[str, str]


_NUMBERS = {"time_ns": "<i8", "level": "<i4", "attempt": "<i4", "rank": "<i4", "step": "<i8"}
_WORDS = ("host", "logger", "stream")
_encode = msgspec.msgpack.Encoder().encode
# times and numbers, positions of words, then the words
_Head: TypeAlias = tuple[
    bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, list[str], list[str], list[str]
]
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_body = msgspec.msgpack.Decoder(list[tuple[str, dict[str, str]]]).decode


class Head(NamedTuple):
    """The columns of a block; `host`, `logger`, `stream` are positions in the lists of words."""

    time_ns: Array
    level: Array
    attempt: Array
    rank: Array
    step: Array
    host: Array
    logger: Array
    stream: Array
    hosts: list[str]
    loggers: list[str]
    streams: list[str]


def pack_block(lines: list[Line]) -> tuple[bytes, bytes]:
    """Return (head, body) of a block."""
    columns = [
        np.array([getattr(line, name) for line in lines], dtype).tobytes()
        for name, dtype in _NUMBERS.items()
    ]
    words = []
    for name in _WORDS:
        places: dict[str, int] = {}
        at = [places.setdefault(getattr(line, name), len(places)) for line in lines]
        columns.append(np.array(at, "<u2").tobytes())
        words.append(list(places))
    body = [(line.message, line.fields) for line in lines]
    return pack(_encode([*columns, *words])), pack(_encode(body))


def read_head(data: bytes) -> Head:
    """Return the columns of a block."""
    *columns, hosts, loggers, streams = _decode_head(unpack(data))
    types = (*_NUMBERS.values(), *("<u2" for _ in _WORDS))
    arrays = [np.frombuffer(column, dtype) for column, dtype in zip(columns, types, strict=True)]
    return Head._make([*arrays, hosts, loggers, streams])


def read_body(data: bytes) -> list[tuple[str, dict[str, str]]]:
    """Return message and fields of each line of a block."""
    return _decode_body(unpack(data))


def read_lines(head: Head, body: list[tuple[str, dict[str, str]]], index: int) -> Line:
    """Return one line of a block."""
    message, fields = body[index]
    return Line(
        time_ns=int(head.time_ns[index]),
        level=int(head.level[index]),
        attempt=int(head.attempt[index]),
        rank=int(head.rank[index]),
        step=int(head.step[index]),
        host=head.hosts[head.host[index]],
        logger=head.loggers[head.logger[index]],
        stream=head.streams[head.stream[index]],
        message=message,
        fields=fields,
    )


def searchable(message: str, fields: dict[str, str], host: str, logger: str) -> str:
    """Return the text that a search looks into, in lower case."""
    parts = [message, logger, host, *(f"{key}={value}" for key, value in fields.items())]
    return "\n".join(parts).lower()


class LineWriter:
    """Collects lines for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._lines: dict[str, list[Line]] = {}

    def add(self, run_id: str, lines: list[Line]) -> None:
        """Add lines of one run, in the order of their arrival."""
        if lines:
            self._lines.setdefault(run_id, []).extend(lines)

    def flush(self) -> None:
        """Write every block that changed."""
        for run_id, lines in self._lines.items():
            block_id, before = self._open_block(run_id)
            lines = before + lines
            while lines:
                count = _fill(lines)
                full = count < len(lines) or count == LINES_PER_BLOCK
                self._write(run_id, block_id, lines[:count], full)
                lines, block_id = lines[count:], None
        self._lines.clear()

    def _open_block(self, run_id: str) -> tuple[int | None, list[Line]]:
        table = tables.log_block.c
        row = self._connection.execute(
            sa.select(table.id, table.head, table.body).where(
                table.run_id == run_id, table.sealed == 0
            )
        ).first()
        if row is None:
            return None, []
        head, body = read_head(row.head), read_body(row.body)
        return int(row.id), [read_lines(head, body, index) for index in range(len(body))]

    def _write(self, run_id: str, block_id: int | None, lines: list[Line], full: bool) -> None:
        head, body = pack_block(lines)
        times = [line.time_ns for line in lines]
        values = {
            "run_id": run_id, "sealed": int(full), "count": len(lines), "head": head, "body": body,
            "time_lo_ns": min(times), "time_hi_ns": max(times),
            "level_hi": max(line.level for line in lines),
        }  # fmt: skip
        table = tables.log_block
        if block_id is None:
            inserted = self._connection.execute(sa.insert(table).values(values))
            block_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
        else:
            self._connection.execute(sa.update(table).where(table.c.id == block_id).values(values))
        if full and self._connection.dialect.name == "sqlite":
            self._connection.exec_driver_sql(
                f"INSERT INTO {INDEX_TABLE}(rowid, terms) VALUES (?, ?)",
                (block_id, " ".join(_words(lines))),
            )


def forget_blocks(connection: sa.Connection, chosen: sa.Select[tuple[int]]) -> None:
    """Take blocks that are about to be removed out of the full-text index."""
    if connection.dialect.name != "sqlite":
        return
    table = tables.log_block.c
    rows = connection.execute(
        sa.select(table.id, table.head, table.body).where(table.id.in_(chosen), table.sealed == 1)
    ).all()
    for block_id, head_data, body_data in rows:
        head, body = read_head(head_data), read_body(body_data)
        lines = [read_lines(head, body, index) for index in range(len(body))]
        connection.exec_driver_sql(  # an index without content wants the words to forget
            f"INSERT INTO {INDEX_TABLE}({INDEX_TABLE}, rowid, terms) VALUES ('delete', ?, ?)",
            (block_id, " ".join(_words(lines))),
        )


def _fill(lines: list[Line]) -> int:
    """Return how many of the lines fit into one block; at least one."""
    chars = 0
    for index, line in enumerate(lines[:LINES_PER_BLOCK]):
        chars += len(line.message) + sum(len(value) for value in line.fields.values())
        if chars > MAX_BODY_CHARS and index:
            return index
    return min(len(lines), LINES_PER_BLOCK)


def _words(lines: list[Line]) -> set[str]:
    words: set[str] = set()
    for line in lines:
        words.update(searchable(line.message, line.fields, line.host, line.logger).split())
    return words
