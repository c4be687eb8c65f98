"""Log lines in compressed blocks, each of one run and one host: what is in a block, and writing.

A block has a tally (how many lines of each rank, level, logger and stream: what counts and filters
need), a head (the columns of its lines) and a body (their texts). What comes is stored at once as
a small block; small ones are joined, in sizes that grow, until they fill one, which is sealed: its
words go into the index, and it never changes again. A line keeps its id: that of the block in
which it came, and its place there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rankscope_server.search.scan import Texts
from rankscope_server.search.words import terms_of
from rankscope_server.store import line_index, tables
from rankscope_server.store.packing import pack, shuffled, unpack, unshuffled

LINES_PER_BLOCK = 1024
MAX_BODY_BYTES = 1 << 20
ID_BITS = 12  # of the id of a line: its place in the block in which it came
_PLACE = (1 << ID_BITS) - 1
_SEALED_LEVEL = 3  # of zstd: these blocks stay
_PENDING_LEVEL = 1

Array = np.ndarray[Any, np.dtype[Any]]
_NUMBERS = {"time_ns": "<i8", "level": "<i4", "attempt": "<i4", "rank": "<i4", "step": "<i8"}
_encode = msgspec.msgpack.Encoder().encode
# columns, loggers, streams, and of each stretch of ids: block, first place, count
_PackedHead: TypeAlias = tuple[list[bytes], list[str], list[str], list[tuple[int, int, int]]]
# texts, ends of lines, lengths of messages, and of lines with fields the lengths of these
_PackedBody: TypeAlias = tuple[bytes, bytes, bytes, dict[int, list[int]]]
_decode_head = msgspec.msgpack.Decoder(_PackedHead).decode
_decode_body = msgspec.msgpack.Decoder(_PackedBody).decode
_OWN_ID = 0  # stands for the id of the block itself, which is not known before it is stored
TALLY = ("attempt", "rank", "level", "logger", "stream", "count")


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


class Head(NamedTuple):
    """The columns of a block; `logger` and `stream` are positions in the lists of names."""

    time_ns: Array
    level: Array
    attempt: Array
    rank: Array
    step: Array
    logger: Array
    stream: Array
    ids: Array
    loggers: list[str]
    streams: list[str]


class Body(NamedTuple):
    """The texts of a block; of each line its message, then `key=value` of its fields."""

    texts: Texts
    message_bytes: Array
    fields: dict[int, list[int]]  # lengths of key, value, key, value ... in bytes

    def line(self, index: int) -> tuple[str, dict[str, str]]:
        """Return the message and the fields of a line."""
        at, _ = self.texts.line(index)
        data = self.texts.data
        message_end = at + int(self.message_bytes[index])
        message, at = data[at:message_end].decode(), message_end
        lengths = iter(self.fields.get(index, ()))
        fields = {}
        for key_bytes, value_bytes in zip(lengths, lengths, strict=True):
            key_end = at + 1 + key_bytes
            at_value, at = key_end + 1, key_end + 1 + value_bytes
            fields[data[key_end - key_bytes : key_end].decode()] = data[at_value:at].decode()
        return message, fields


def text_of(message: str, fields: dict[str, str]) -> str:
    """Return the text that a search looks into."""
    return "\n".join((message, *(f"{key}={value}" for key, value in fields.items())))


def read_head(data: bytes, block_id: int) -> Head:
    """Return the columns of a block."""
    columns, loggers, streams, stretches = _decode_head(unpack(data))
    types = (*_NUMBERS.values(), "<u2", "<u2")
    arrays = [
        unshuffled(column, np.dtype(dtype)) for column, dtype in zip(columns, types, strict=True)
    ]
    arrays[0] = np.cumsum(arrays[0])
    ids = np.concatenate(
        [
            ((block or block_id) << ID_BITS) + np.arange(first, first + count, dtype=np.int64)
            for block, first, count in stretches
        ]
    )
    return Head._make([*arrays, ids, loggers, streams])


def read_body(data: bytes) -> Body:
    """Return the texts of a block."""
    texts, ends, lengths, fields = _decode_body(unpack(data))
    lines = Texts(texts, np.frombuffer(ends, "<u4").astype(np.int64))
    return Body(lines, np.frombuffer(lengths, "<u4"), fields)


def read_tallies(data: list[bytes]) -> tuple[Array, Array]:
    """Return the rows of several tallies, columns as in `TALLY`, and the position of each one's."""
    rows = np.frombuffer(b"".join(data), "<i4").reshape(-1, len(TALLY))
    width = 4 * len(TALLY)
    return rows, np.repeat(np.arange(len(data)), [len(one) // width for one in data])


def read_line(host: str, head: Head, body: Body, index: int) -> Line:
    """Return one line of a block."""
    message, fields = body.line(index)
    return Line(
        time_ns=int(head.time_ns[index]),
        level=int(head.level[index]),
        attempt=int(head.attempt[index]),
        rank=int(head.rank[index]),
        step=int(head.step[index]),
        host=host,
        logger=head.loggers[head.logger[index]],
        stream=head.streams[head.stream[index]],
        message=message,
        fields=fields,
    )


class _Stored(NamedTuple):
    """A line with the block in which it came, and its place there."""

    line: Line
    block: int
    place: int


class LineWriter:
    """Collects lines for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._lines: dict[tuple[str, str], list[Line]] = {}
        self._words: dict[tuple[str, str], int] = {}

    def add(self, run_id: str, lines: list[Line]) -> None:
        """Add lines of one run, in the order of their arrival."""
        for line in lines:
            self._lines.setdefault((run_id, line.host), []).append(line)

    def flush(self) -> None:
        """Write what was added."""
        for (run_id, host), lines in self._lines.items():
            self._know(run_id, {host})
            fresh = [_Stored(line, _OWN_ID, 0) for line in lines]
            stored = [*self._joinable(run_id, host, len(lines)), *fresh]
            self._know(run_id, {x for line, _, _ in stored for x in (line.logger, line.stream)})
            at = 0
            while at < len(stored):
                count, is_full = _fill(stored, at)
                self._write(run_id, host, stored[at : at + count], is_full)
                at += count
        self._lines.clear()

    def _joinable(self, run_id: str, host: str, num_lines: int) -> list[_Stored]:
        """Take out the small blocks that are joined with so many new lines.

        A line is joined with others of its host a few times in all: blocks grow as the digits of
        a number that is counted up.
        """
        block, data = tables.log_block.c, tables.log_lines.c
        pending = self._connection.execute(
            sa.select(block.id, block["count"])
            .where(
                block.run_id == run_id, block.sealed == 0, block.host == self._words[run_id, host]
            )
            .order_by(block.id.desc())
            .with_for_update(skip_locked=True)
        ).all()
        is_full = num_lines + sum(count for _, count in pending) >= LINES_PER_BLOCK
        taken, size = [], num_lines
        for block_id, count in pending:
            if not is_full and count > 2 * size:
                break
            taken.append(block_id)
            size += count
        if not taken:
            return []
        rows = self._connection.execute(
            sa.select(data.block_id, data.head, data.body)
            .where(data.block_id.in_(taken))
            .order_by(data.block_id)
        )
        stored = [line for row in rows for line in _unpacked(host, *row)]
        self._connection.execute(sa.delete(tables.log_block).where(block.id.in_(taken)))
        self._connection.execute(sa.delete(tables.log_lines).where(data.block_id.in_(taken)))
        return stored

    def _write(self, run_id: str, host: str, stored: list[_Stored], is_full: bool) -> None:
        lines = [line for line, _, _ in stored]
        times = [line.time_ns for line in lines]
        steps = [line.step for line in lines]
        texts = (text_of(line.message, line.fields) for line in lines)
        terms = terms_of(texts) if is_full else set()
        is_indexed = is_full and line_index.takes(terms)
        sealed = 1 if is_indexed else 2 if is_full else 0
        inserted = self._connection.execute(
            sa.insert(tables.log_block).values(
                run_id=run_id, host=self._words[run_id, host], sealed=sealed, count=len(lines),
                first_row=min((place.block for place in stored if place.block), default=_OWN_ID),
                time_lo_ns=min(times), time_hi_ns=max(times), step_lo=min(steps),
                step_hi=max(steps), level_hi=max(line.level for line in lines),
                tally=self._tally(run_id, lines),
            )
        )  # fmt: skip
        block_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
        level = _SEALED_LEVEL if is_full else _PENDING_LEVEL
        self._connection.execute(
            sa.insert(tables.log_lines).values(
                block_id=block_id, head=_pack_head(stored, level), body=_pack_body(lines, level)
            )
        )
        if is_indexed:
            line_index.add(self._connection, block_id, terms)

    def _tally(self, run_id: str, lines: list[Line]) -> bytes:
        counts = Counter(
            (line.attempt, line.rank, line.level, line.logger, line.stream) for line in lines
        )
        rows = [
            (*numbers, self._words[run_id, logger], self._words[run_id, stream], count)
            for (*numbers, logger, stream), count in counts.items()
        ]
        return np.array(rows, "<i4").tobytes()

    def _know(self, run_id: str, words: set[str]) -> None:
        """Give each word that has none a number."""
        unknown = [word for word in words if (run_id, word) not in self._words]
        if not unknown:
            return
        table = tables.log_word
        found = self._numbers(run_id, unknown)
        if fresh := [word for word in unknown if word not in found]:
            is_sqlite = self._connection.dialect.name == "sqlite"
            insert: Any = sqlite.insert if is_sqlite else postgresql.insert
            self._connection.execute(
                insert(table).on_conflict_do_nothing(index_elements=[table.c.run_id, table.c.word]),
                [{"run_id": run_id, "word": word} for word in sorted(fresh)],
            )
            found |= self._numbers(run_id, fresh)
        self._words.update({(run_id, word): number for word, number in found.items()})

    def _numbers(self, run_id: str, words: list[str]) -> dict[str, int]:
        table = tables.log_word.c
        found: dict[str, int] = {}
        for at in range(0, len(words), 500):  # SQLite bounds the number of parameters
            rows = self._connection.execute(
                sa.select(table.word, table.id).where(
                    table.run_id == run_id, table.word.in_(words[at : at + 500])
                )
            )
            found |= {word: number for word, number in rows}
        return found


def _fill(stored: list[_Stored], at: int) -> tuple[int, bool]:
    """Return how many lines from `at` on fit into one block, at least one, and if it is full."""
    size = 0
    for count, (line, _, _) in enumerate(stored[at : at + LINES_PER_BLOCK]):
        size += len(line.message) + sum(map(len, line.fields.values()))
        if size > MAX_BODY_BYTES and count:
            return count, True
    count = min(len(stored) - at, LINES_PER_BLOCK)
    return count, count == LINES_PER_BLOCK


def _unpacked(host: str, block_id: int, head_data: bytes, body_data: bytes) -> list[_Stored]:
    head, body = read_head(head_data, block_id), read_body(body_data)
    ids = head.ids.tolist()
    return [
        _Stored(read_line(host, head, body, index), line_id >> ID_BITS, line_id & _PLACE)
        for index, line_id in enumerate(ids)
    ]


def _pack_head(stored: list[_Stored], level: int) -> bytes:
    lines = [line for line, _, _ in stored]
    arrays = {
        name: np.array([getattr(line, name) for line in lines], dtype)
        for name, dtype in _NUMBERS.items()
    }
    arrays["time_ns"] = np.diff(arrays["time_ns"], prepend=np.int64(0))
    columns, names = [shuffled(array) for array in arrays.values()], []
    for name in ("logger", "stream"):
        places: dict[str, int] = {}
        at = [places.setdefault(getattr(line, name), len(places)) for line in lines]
        columns.append(shuffled(np.array(at, "<u2")))
        names.append(list(places))
    return pack(_encode((columns, *names, _stretches(stored))), level)


def _stretches(stored: list[_Stored]) -> list[tuple[int, int, int]]:
    """Return the ids of lines as (block, first place, count), one after the other."""
    stretches: list[tuple[int, int, int]] = []
    fresh = 0
    for _, block, place in stored:
        if block == _OWN_ID:
            fresh += 1
        elif stretches and stretches[-1][0] == block and sum(stretches[-1][1:]) == place:
            stretches[-1] = (block, stretches[-1][1], stretches[-1][2] + 1)
        else:
            stretches.append((block, place, 1))
    return [*stretches, (_OWN_ID, 0, fresh)] if fresh else stretches


def _pack_body(lines: list[Line], level: int) -> bytes:
    texts, lengths, fields = [], [], {}
    for index, line in enumerate(lines):
        texts.append(text_of(line.message, line.fields).encode())
        lengths.append(len(line.message.encode()) if line.fields else len(texts[-1]))
        if line.fields:
            fields[index] = [len(part.encode()) for field in line.fields.items() for part in field]
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    data = b"\n".join((*texts, b""))
    packed = data, ends.astype("<u4").tobytes(), np.array(lengths, "<u4").tobytes(), fields
    return pack(_encode(packed), level)
