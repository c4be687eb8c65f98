"""Finds log lines: the index names blocks, the blocks are scanned for the rest.

A search is a list of words, or phrases in quotation marks; a line matches if it holds each of
them anywhere, in any case: in its message, fields, logger or host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.lines import (
    INDEX_TABLE,
    LINES_PER_BLOCK,
    Head,
    Line,
    read_body,
    read_head,
    read_lines,
    searchable,
)
from rankscope_server.store.projects import of_project

Array = np.ndarray[Any, np.dtype[Any]]
MAX_BLOCKS = 20_000  # ten million lines whose heads one answer looks at
MAX_BODIES = 4_000  # two million lines whose text one answer reads
MAX_TRIGRAMS = 32
DIMENSIONS = ("rank", "level", "host", "logger", "stream")
_WORD = re.compile(r'"([^"]+)"|(\S+)')


@dataclass(frozen=True, slots=True)
class LogQuery:
    """What lines are wanted. Empty means any."""

    words: tuple[str, ...] = ()  # in lower case
    ranks: tuple[tuple[int, int], ...] = ()  # ranges, both ends included
    levels: tuple[tuple[int, int], ...] = ()
    hosts: tuple[str, ...] = ()
    loggers: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    from_ns: int | None = None
    to_ns: int | None = None
    after_id: int | None = None  # only lines that came later
    project: str | None = None  # of a search in all runs: only those of this project


@dataclass(slots=True)
class Matches:
    """Every matching line by id, time and level, and how many each value of a filter would give."""

    ids: Array
    times: Array
    levels: Array
    facets: dict[str, dict[Any, int]]
    is_cut: bool = False  # older blocks were not looked at


@dataclass(slots=True)
class _Columns:
    ids: list[Array] = field(default_factory=list)
    times: list[Array] = field(default_factory=list)
    levels: list[Array] = field(default_factory=list)


def words_of(text: str) -> tuple[str, ...]:
    """Return the words and phrases of a search, in lower case."""
    found = (phrase or word for phrase, word in _WORD.findall(text.replace("\x00", " ")))
    return tuple(dict.fromkeys(word.strip('"').lower() for word in found if word.strip('"')))


def find(connection: sa.Connection, run_id: str | None, query: LogQuery) -> Matches:
    """Return all matching lines of a run, or of all runs."""
    columns = _Columns()
    facets: dict[str, dict[Any, int]] = {name: {} for name in DIMENSIONS}
    looked = 0
    most = MAX_BODIES if query.words else MAX_BLOCKS
    for block_id, head_data, body in _blocks(connection, run_id, query, most + 1):
        looked += 1
        if looked > most:
            break
        head = read_head(head_data)
        base = _text_and_time(query, block_id, head, body)
        if not base.any():
            continue
        masks = _masks(query, head)
        _count_facets(facets, head, base, masks)
        chosen = np.flatnonzero(base & np.logical_and.reduce(list(masks.values())))
        columns.ids.append(block_id * LINES_PER_BLOCK + chosen)
        columns.times.append(head.time_ns[chosen])
        columns.levels.append(head.level[chosen])
    return Matches(
        ids=_joined(columns.ids),
        times=_joined(columns.times),
        levels=_joined(columns.levels),
        facets=facets,
        is_cut=looked > most,
    )


def newest_line_id(connection: sa.Connection, run_id: str) -> int:
    """Return the id of the line that came last; 0 for none."""
    table = tables.log_block.c
    row = connection.execute(
        sa.select(table.id, table.count)
        .where(table.run_id == run_id)
        .order_by(table.id.desc())
        .limit(1)
    ).first()
    return 0 if row is None else int(row[0]) * LINES_PER_BLOCK + int(row[1]) - 1


def fetch(connection: sa.Connection, ids: list[int]) -> dict[int, tuple[str, Line]]:
    """Return (run, line) for each id."""
    table = tables.log_block.c
    wanted: dict[int, list[int]] = {}
    for line_id in ids:
        wanted.setdefault(line_id // LINES_PER_BLOCK, []).append(line_id)
    lines: dict[int, tuple[str, Line]] = {}
    blocks = list(wanted)
    for at in range(0, len(blocks), 500):  # SQLite bounds the number of parameters
        rows = connection.execute(
            sa.select(table.id, table.run_id, table.head, table.body).where(
                table.id.in_(blocks[at : at + 500])
            )
        )
        for row in rows:
            head, body = read_head(row.head), read_body(row.body)
            for line_id in wanted[row.id]:
                index = line_id % LINES_PER_BLOCK
                if index < len(body):
                    lines[line_id] = (row.run_id, read_lines(head, body, index))
    return lines


def _blocks(
    connection: sa.Connection, run_id: str | None, query: LogQuery, limit: int
) -> Iterator[tuple[int, bytes, bytes | None]]:
    table = tables.log_block.c
    where = of_project(tables.log_block, query.project)
    if run_id is not None:
        where.append(table.run_id == run_id)
    else:  # the lines of a deleted run go a little later than the run
        where.append(table.run_id.not_in(sa.select(tables.deletion.c.run_id)))
    if query.from_ns is not None:
        where.append(table.time_hi_ns >= query.from_ns)
    if query.to_ns is not None:
        where.append(table.time_lo_ns <= query.to_ns)
    if query.after_id is not None:
        where.append(table.id >= query.after_id // LINES_PER_BLOCK)
    trigrams = _trigrams(query.words) if connection.dialect.name == "sqlite" else []
    if trigrams:
        match = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in trigrams)
        indexed = sa.text(f"SELECT rowid FROM {INDEX_TABLE} WHERE {INDEX_TABLE} MATCH :match")
        candidates = indexed.bindparams(match=match).columns(sa.column("rowid", sa.Integer))
        where.append(sa.or_(table.sealed == 0, table.id.in_(candidates)))
    body = table.body if query.words else sa.null()
    rows = connection.execute(
        sa.select(table.id, table.head, body)
        .where(*where)
        .order_by(table.time_hi_ns.desc())
        .limit(limit)
    )
    for row in rows:
        yield int(row[0]), row[1], row[2]


def _trigrams(words: tuple[str, ...]) -> list[str]:
    """Return trigrams that a block must hold; a phrase gives those inside its words."""
    grams: dict[str, None] = {}
    for phrase in words:
        for word in phrase.split():
            grams.update(dict.fromkeys(word[at : at + 3] for at in range(len(word) - 2)))
    return list(grams)[:MAX_TRIGRAMS]


def _text_and_time(query: LogQuery, block_id: int, head: Head, body: bytes | None) -> Array:
    mask = np.ones(len(head.time_ns), bool)
    if query.from_ns is not None:
        mask &= head.time_ns >= query.from_ns
    if query.to_ns is not None:
        mask &= head.time_ns <= query.to_ns
    if query.after_id is not None:
        mask &= block_id * LINES_PER_BLOCK + np.arange(len(mask)) > query.after_id
    if query.words and body is not None and mask.any():
        lines = read_body(body)
        for index in np.flatnonzero(mask).tolist():
            message, fields = lines[index]
            host, logger = head.hosts[head.host[index]], head.loggers[head.logger[index]]
            text = searchable(message, fields, host, logger)
            mask[index] = all(word in text for word in query.words)
    return mask


def _masks(query: LogQuery, head: Head) -> dict[str, Array]:
    return {
        "rank": _in_ranges(head.rank, query.ranks),
        "level": _in_ranges(head.level, query.levels),
        "host": _in_words(head.host, head.hosts, query.hosts),
        "logger": _in_words(head.logger, head.loggers, query.loggers),
        "stream": _in_words(head.stream, head.streams, query.streams),
    }


def _in_ranges(values: Array, ranges: tuple[tuple[int, int], ...]) -> Array:
    mask = np.full(len(values), not ranges)
    for lo, hi in ranges:
        mask |= (values >= lo) & (values <= hi)
    return mask


def _in_words(places: Array, words: list[str], wanted: tuple[str, ...]) -> Array:
    if not wanted:
        return np.ones(len(places), bool)
    return np.isin(places, [at for at, word in enumerate(words) if word in wanted])


def _count_facets(
    facets: dict[str, dict[Any, int]], head: Head, base: Array, masks: dict[str, Array]
) -> None:
    words = {"host": head.hosts, "logger": head.loggers, "stream": head.streams}
    for name in DIMENSIONS:
        # Without its own filter: the page shows what choosing another value would give.
        others = [mask for other, mask in masks.items() if other != name]
        chosen = getattr(head, name)[base & np.logical_and.reduce(others)]
        values, counts = np.unique(chosen, return_counts=True)
        known = words.get(name)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            key = known[value] if known is not None else value
            facets[name][key] = facets[name].get(key, 0) + count


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
