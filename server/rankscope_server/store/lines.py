"""Log lines in compressed blocks, each of one run and one host: what is in a block, and writing.

A block has a tally (how many lines of each kind: what counts and filters need), a head (the columns
of its lines) and a body (their texts). What comes is stored at once as a small block; small ones
are joined, in sizes that grow, until they fill one, which is sealed: its words go into the index,
and it never changes again. A line keeps its id: that of the block in which it came, and its place
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rankscope_server.search.pairs import pairs_of
from rankscope_server.search.scan import Texts
from rankscope_server.search.words import terms_of
from rankscope_server.store import line_index, tables
from rankscope_server.store.line_kinds import COLUMNS, KindNumbers
from rankscope_server.store.packing import narrowed, pack, unpack, widened

LINES_PER_BLOCK = 1024
MAX_BODY_BYTES = 1 << 20
ID_BITS = 12  # of the id of a line: its place in the block in which it came
_PLACE = (1 << ID_BITS) - 1
_SEALED_LEVEL = 3  # of zstd: these blocks stay
_PENDING_LEVEL = 1

Array = np.ndarray[Any, np.dtype[Any]]
_encode = msgspec.msgpack.Encoder().encode
# columns, and of each stretch of ids its first one and its length
_PackedHead: TypeAlias = tuple[list[bytes], list[tuple[int, int]]]
_PackedBody: TypeAlias = tuple[bytes, list[bytes]]  # texts, columns
_decode_head = msgspec.msgpack.Decoder(_PackedHead).decode
_decode_body = msgspec.msgpack.Decoder(_PackedBody).decode


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
    """The columns of a block; `logger` and `stream` are numbers of words in `log_word`."""

    time_ns: Array
    level: Array
    attempt: Array
    rank: Array
    step: Array
    logger: Array
    stream: Array
    ids: Array


class Body(NamedTuple):
    """The texts of a block; of each line its message, then `key=value` of its fields."""

    texts: Texts
    message_bytes: Array
    num_lengths: Array  # of each line: two for each field
    lengths: Array  # of key, value, key, value ... of all lines, in bytes

    def line(self, index: int) -> tuple[str, dict[str, str]]:
        """Return the message and the fields of a line."""
        at, _ = self.texts.line(index)
        data = self.texts.data
        message_end = at + int(self.message_bytes[index])
        message, at = data[at:message_end].decode(), message_end
        if not self.num_lengths[index]:
            return message, {}
        first = int(self.num_lengths[:index].sum())
        lengths = iter(self.lengths[first : first + self.num_lengths[index]].tolist())
        fields = {}
        for key_bytes, value_bytes in zip(lengths, lengths, strict=True):
            key_end = at + 1 + key_bytes
            at_value, at = key_end + 1, key_end + 1 + value_bytes
            fields[data[key_end - key_bytes : key_end].decode()] = data[at_value:at].decode()
        return message, fields


class Columns(NamedTuple):
    """Lines of one host, column by column."""

    head: Head
    body: Body

    def cut(self, first: int, count: int) -> Columns:
        """Return so many lines from one on."""
        chosen = slice(first, first + count)
        body, texts = self.body, self.body.texts
        start, _ = texts.line(first)
        end = int(texts.ends[first + count - 1])
        lengths = int(body.num_lengths[:first].sum())
        num_lengths = body.num_lengths[chosen]
        return Columns(
            Head._make(column[chosen] for column in self.head),
            Body(
                Texts(texts.data[start : end + 1], texts.ends[chosen] - start),
                body.message_bytes[chosen],
                num_lengths,
                body.lengths[lengths : lengths + int(num_lengths.sum())],
            ),
        )

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        """Return the lines of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        ends, offset = [], 0
        for part in parts:
            ends.append(part.body.texts.ends + offset)
            offset += len(part.body.texts.data)
        texts = Texts(b"".join(part.body.texts.data for part in parts), np.concatenate(ends))
        columns = zip(*(part.body[1:] for part in parts), strict=True)
        return Columns(
            Head._make(map(np.concatenate, zip(*(part.head for part in parts), strict=True))),
            Body(texts, *map(np.concatenate, columns)),
        )


def text_of(message: str, fields: dict[str, str]) -> str:
    """Return the text that a search looks into."""
    if not fields:
        return message
    return "\n".join((message, *(f"{key}={value}" for key, value in fields.items())))


def read_head(data: bytes, block_id: int) -> Head:
    """Return the columns of a block."""
    columns, stretches = _decode_head(unpack(data))
    time_ns, *others = map(widened, columns)
    ids = np.concatenate([np.arange(first, first + count) for first, count in stretches])
    ids[ids <= _PLACE] += block_id << ID_BITS  # those that came with the block itself
    return Head._make([np.cumsum(time_ns), *others, ids])


def read_body(data: bytes) -> Body:
    """Return the texts of a block."""
    texts, columns = _decode_body(unpack(data))
    line_bytes, *others = map(widened, columns)
    return Body(Texts(texts, np.cumsum(line_bytes) - 1), *others)


def read_tallies(data: Sequence[bytes]) -> tuple[Array, Array, Array]:
    """Return numbers of kinds, how many lines there are of each, and the position of its tally."""
    kinds, counts = np.frombuffer(b"".join(data), "<i4").reshape(-1, 2).T
    return kinds, counts, np.repeat(np.arange(len(data)), [len(one) // 8 for one in data])


def read_line(host: str, names: dict[int, str], head: Head, body: Body, index: int) -> Line:
    """Return one line of a block; `names` are the words of loggers and streams."""
    message, fields = body.line(index)
    return Line(
        time_ns=int(head.time_ns[index]),
        level=int(head.level[index]),
        attempt=int(head.attempt[index]),
        rank=int(head.rank[index]),
        step=int(head.step[index]),
        host=host,
        logger=names[int(head.logger[index])],
        stream=names[int(head.stream[index])],
        message=message,
        fields=fields,
    )


def read_words(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, str]:
    """Return the words of numbers."""
    table = tables.log_word.c
    words: dict[int, str] = {}
    for at in range(0, len(numbers), 500):  # SQLite bounds the number of parameters
        rows = connection.execute(
            sa.select(table.id, table.word).where(table.id.in_(numbers[at : at + 500]))
        )
        words.update({number: word for number, word in rows})
    return words


class LineWriter:
    """Collects lines for one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._lines: dict[tuple[str, str], list[Line]] = {}
        self._words: dict[tuple[str, str], int] = {}
        self._kinds = KindNumbers(connection)

    def add(self, run_id: str, host: str, lines: list[Line]) -> None:
        """Add lines of one run and host, in the order of their arrival."""
        if lines:
            self._lines.setdefault((run_id, host), []).extend(lines)

    def flush(self) -> None:
        """Write what was added."""
        for (run_id, host), lines in self._lines.items():
            columns = self._columns(run_id, host, lines)
            host_number = self._words[run_id, host]
            before = self._joinable(run_id, host_number, len(lines))
            columns = Columns.joined([*before, columns])
            at, num_lines = 0, len(columns.head.ids)
            while at < num_lines:
                count, is_full = _fill(columns.body.texts, at)
                self._write(run_id, host_number, columns.cut(at, count), is_full)
                at += count
        self._lines.clear()

    def _columns(self, run_id: str, host: str, lines: list[Line]) -> Columns:
        *numbers, _, loggers, streams, messages, fields = zip(*lines, strict=True)
        self._know(run_id, {host, *loggers, *streams})
        words = self._words
        columns = [
            *numbers,
            [words[run_id, logger] for logger in loggers],
            [words[run_id, stream] for stream in streams],
            [0] * len(lines),
        ]
        arrays = (np.array(column, np.int64) for column in columns)
        return Columns(Head._make(arrays), _body_of(messages, fields))

    def _joinable(self, run_id: str, host: int, num_lines: int) -> list[Columns]:
        """Take out the small blocks that are joined with so many new lines.

        A line is joined with others of its host a few times in all: blocks grow as the digits of
        a number that is counted up.
        """
        block, data = tables.log_block.c, tables.log_lines.c
        pending = self._connection.execute(
            sa.select(block.id, block["count"])
            .where(block.run_id == run_id, block.sealed == 0, block.host == host)
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
        ).all()
        self._connection.execute(sa.delete(tables.log_block).where(block.id.in_(taken)))
        self._connection.execute(sa.delete(tables.log_lines).where(data.block_id.in_(taken)))
        return [Columns(read_head(row.head, row.block_id), read_body(row.body)) for row in rows]

    def _write(self, run_id: str, host: int, columns: Columns, is_full: bool) -> None:
        head, texts = columns.head, columns.body.texts
        terms = terms_of(texts.data) | pairs_of(texts.data) if is_full else set()
        is_indexed = is_full and line_index.takes(terms)
        rows = head.ids[head.ids > _PLACE] >> ID_BITS  # of lines that were stored before
        steps = head.step[head.step > 0] if head.step.any() else head.step
        level = _SEALED_LEVEL if is_full else _PENDING_LEVEL
        packed = {"head": _pack_head(head, level), "body": _pack_body(columns.body, level)}
        inserted = self._connection.execute(
            sa.insert(tables.log_block),
            {
                "run_id": run_id, "host": host, "sealed": 1 if is_indexed else 2 if is_full else 0,
                "count": len(head.ids), "first_row": int(rows.min()) if len(rows) else 0,
                "time_lo_ns": int(head.time_ns.min()), "time_hi_ns": int(head.time_ns.max()),
                "step_lo": int(steps.min()), "step_hi": int(steps.max()),
                "level_hi": int(head.level.max()), "tally": self._tally(run_id, head),
                "num_bytes": sum(map(len, packed.values())),
            },
        )  # fmt: skip
        block_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
        self._connection.execute(sa.insert(tables.log_lines), {"block_id": block_id, **packed})
        if is_indexed:
            line_index.add(self._connection, block_id, terms)

    def _tally(self, run_id: str, head: Head) -> bytes:
        """Return how many lines there are of each kind."""
        has_step = (head.step > 0).astype(np.int64)
        what = head.logger << 32 | head.stream << 1 | has_step
        kinds, what = np.unique(what, return_inverse=True)
        who = head.attempt << 40 | (head.rank + 1) << 16 | head.level
        who = np.unique(who, return_inverse=True)[1]
        _, first, counts = np.unique(who * len(kinds) + what, return_index=True, return_counts=True)
        columns = [getattr(head, name)[first].tolist() for name in COLUMNS[:-1]]
        rows = list(zip(*columns, has_step[first].tolist(), strict=True))
        numbers = self._kinds.of(run_id, rows)
        return np.column_stack([numbers, counts]).astype("<i4").tobytes()

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


def forget_blocks(connection: sa.Connection, chosen: sa.Select[tuple[int]]) -> None:
    """Remove the lines of blocks that are about to be removed, and take them out of the index."""
    block, data = tables.log_block.c, tables.log_lines.c
    rows = connection.execute(
        sa.select(block.id, data.body)
        .join_from(tables.log_block, tables.log_lines, block.id == data.block_id)
        .where(block.id.in_(chosen), block.sealed == 1)
    ).all()
    for block_id, body in rows:
        texts = read_body(body).texts
        line_index.forget(connection, block_id, terms_of(texts.data) | pairs_of(texts.data))
    connection.execute(sa.delete(tables.log_lines).where(data.block_id.in_(chosen)))


def _fill(texts: Texts, at: int) -> tuple[int, bool]:
    """Return how many lines from `at` on fit into one block, at least one, and if it is full."""
    start, _ = texts.line(at)
    fitting = int(np.searchsorted(texts.ends, start + MAX_BODY_BYTES, "right")) - at
    count = min(len(texts.ends) - at, LINES_PER_BLOCK, max(fitting, 1))
    return count, count == LINES_PER_BLOCK or at + count < len(texts.ends)


def _body_of(messages: Sequence[str], fields: Sequence[dict[str, str]]) -> Body:
    texts = [
        text_of(message, more) if more else message
        for message, more in zip(messages, fields, strict=True)
    ]
    whole = "\n".join([*texts, ""])
    data = whole.encode()
    is_ascii = len(data) == len(whole)
    num_bytes = np.array([len(text if is_ascii else text.encode()) for text in texts], np.int64)
    message_bytes = num_bytes.copy()  # most lines have no fields
    lengths: list[int] = []
    for place in [place for place, one in enumerate(fields) if one]:
        message_bytes[place] = len(messages[place].encode())
        lengths += [len(part.encode()) for field in fields[place].items() for part in field]
    return Body(
        Texts(data, np.cumsum(num_bytes + 1) - 1),
        message_bytes,
        2 * np.fromiter(map(len, fields), np.int64, len(fields)),
        np.array(lengths, np.int64),
    )


def _pack_head(head: Head, level: int) -> bytes:
    fresh = np.flatnonzero(head.ids <= _PLACE)
    ids = head.ids.copy()
    ids[fresh] = np.arange(len(fresh))  # the id of the block is not known before it is stored
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    stretches = zip(ids[starts].tolist(), np.diff(starts, append=len(ids)).tolist(), strict=True)
    columns = [np.diff(head.time_ns, prepend=0), *head[1:-1]]
    return pack(_encode((list(map(narrowed, columns)), list(stretches))), level)


def _pack_body(body: Body, level: int) -> bytes:
    columns = [np.diff(body.texts.ends, prepend=-1), *body[1:]]
    return pack(_encode((body.texts.data, list(map(narrowed, columns)))), level)
