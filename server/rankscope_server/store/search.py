"""Finds log lines, newest first: the index and the tallies name blocks, their lines are searched.

An answer stops when it has its page and has counted for a while; a query that finds little in
much text stops after a bound of text, says how far it came, and goes on from there when it is
asked to. What was counted is everything, or is said to be the least that there is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from rankscope_server.search.lookup import lookup_of
from rankscope_server.search.tree import (
    EVERYTHING,
    Node,
    Regex,
    Text,
    Time,
    both,
    leaves,
)
from rankscope_server.store import line_index, tables
from rankscope_server.store.line_counts import DIMENSIONS, OF_ALL_RUNS, Counts, Histogram
from rankscope_server.store.line_filter import (
    Lines,
    Masks,
    RunNumbers,
    Tallies,
    match_lines,
    match_tallies,
)
from rankscope_server.store.line_kinds import Kinds
from rankscope_server.store.line_runs import Groups, in_visible_runs, needed
from rankscope_server.store.lines import (
    ID_BITS,
    Body,
    Head,
    Line,
    read_body,
    read_head,
    read_line,
    read_tallies,
    read_words,
)

Array = np.ndarray[Any, np.dtype[Any]]
# Bytes of text that one answer searches; more is left to the next one. What the index narrows
# badly, a regular expression and a text within words, may take longer.
MAX_READ_BYTES = 8 << 20
MAX_READ_BYTES_WITHIN_WORDS = 40 << 20
COUNT_READ_BYTES = 4 << 20  # that it searches to count once its page is full
COUNT_LINES = 10_000  # and the lines after which it counts no further
MAX_BLOCKS = 16_384  # whose tallies one answer looks at: of some 16 million lines
MAX_TAIL_BLOCKS = 2_000
_FEWEST_ROWS, _MOST_ROWS = 128, 2048  # blocks whose tallies are looked at together
_FEW = 32
_BYTES_OF_HEAD = 16  # of a line, whose columns take the time of so much text
_MOST = (1 << 63) - 1


class Cursor(NamedTuple):
    """A place in the order of lines: those after it are wanted."""

    time_ns: int
    line_id: int


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines are wanted: the search box, and chosen values of filters by their name."""

    node: Node = EVERYTHING
    filters: Mapping[str, Node] = field(default_factory=dict)
    from_ns: int | None = None
    to_ns: int | None = None
    project: str | None = None  # of a search in all runs: only those of this project

    @property
    def whole(self) -> Node:
        """Return all of it as one tree."""
        return both(self.base, *self.filters.values())

    @property
    def base(self) -> Node:
        """Return what is left without the filters."""
        if self.from_ns is None and self.to_ns is None:
            return self.node
        return both(self.node, Time(self.from_ns, self.to_ns))


class FoundLine(NamedTuple):
    """A line with its id and its run."""

    id: int
    run_id: str
    line: Line


@dataclass(slots=True)
class Found:
    """A page of lines, and how many there are in all."""

    lines: list[FoundLine]
    counts: Counts
    cursor: Cursor | None = None  # where the next page begins; None: there is none
    is_counted: bool = True  # False: there are at least so many
    searched_to_ns: int | None = None  # the text behind this time was not searched; None: all was


_COLUMNS = [
    *(
        tables.log_block.c[name]
        for name in "id run_id host time_lo_ns time_hi_ns step_lo step_hi count".split()
    ),
    sa.type_coerce(tables.log_block.c.tally, sa.types.NullType()),  # bytes as they come
]


class _Block(NamedTuple):
    id: int
    run_id: str
    host: int
    time_lo_ns: int
    time_hi_ns: int
    step_lo: int
    step_hi: int
    num_lines: int
    tally: bytes


class _Blocks:
    """Blocks as they were read, many at once: column by column, and each where it is asked for."""

    def __init__(self, rows: Sequence[sa.Row[Any]]) -> None:
        self._rows = rows
        ids, self.run_ids, hosts, *bounds, _, self.tallies = zip(*rows, strict=True)
        self.ids, self.hosts = np.array(ids, np.int64), np.array(hosts, np.int64)
        self.bounds = np.array(bounds, np.int64)  # times and steps, as in a block

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> _Block:
        return _Block._make(self._rows[at])

    def edges(self, sign: int) -> Array:
        """Return the time by which each is ordered: its last, or its first where `sign` is -1."""
        edges: Array = self.bounds[1 if sign > 0 else 0]
        return edges


class _Hit(NamedTuple):
    time_ns: int
    id: int
    run_id: str
    line: Line | tuple[Lines, int]  # or where it is


class _Page:
    """The first lines in an order of time, of blocks that come in the order of their first time."""

    def __init__(self, limit: int, sign: int) -> None:
        self._limit, self._sign = limit, sign
        self._hits: list[_Hit] = []
        self._border = -_MOST  # of the last line that is on the page, once it is full

    def wants(self, edges: Array) -> Array:
        """Return whether lines of blocks that begin at these times may come onto the page."""
        if not self.is_full:
            return np.ones(len(edges), bool)
        mask: Array = self._sign * edges >= self._border
        return mask

    def add(self, block: _Block, lines: Lines, chosen: Array) -> None:
        """Add lines of a block."""
        times, ids = lines.head.time_ns, lines.head.ids
        if len(chosen) > self._limit:
            order = np.lexsort((self._sign * ids[chosen], self._sign * times[chosen]))
            chosen = chosen[order[-self._limit :]]
        body = lines.body
        for at in chosen.tolist():
            line: Line | tuple[Lines, int] = (lines, at)
            if len(chosen) <= _FEW:  # else from few blocks, which can be kept
                line = read_line(lines.names[lines.host], lines.names, lines.head, body, at)
            self._hits.append(_Hit(int(times[at]), int(ids[at]), block.run_id, line))
        if len(self._hits) >= self._limit:
            self._hits.sort(key=lambda hit: (self._sign * hit.time_ns, self._sign * hit.id))
            self._hits = self._hits[-self._limit :]
            self._border = self._sign * self._hits[0].time_ns

    def lines(self, until_ns: int | None) -> list[FoundLine]:
        """Return the lines, first ones first; with `until_ns` only those before it."""
        wanted = [
            hit
            for hit in self._hits
            if until_ns is None or self._sign * hit.time_ns > self._sign * until_ns
        ]
        wanted.sort(key=lambda hit: (-self._sign * hit.time_ns, -self._sign * hit.id))
        return [FoundLine(hit.id, hit.run_id, _line(hit.line)) for hit in wanted]

    @property
    def is_full(self) -> bool:
        """Return whether it has as many lines as it may."""
        return len(self._hits) >= self._limit


def _line(line: Line | tuple[Lines, int]) -> Line:
    if isinstance(line, Line):
        return line
    lines, at = line
    return read_line(lines.names[lines.host], lines.names, lines.head, lines.body, at)


class Search:
    """One search over the lines of a run, or of all runs; sees one state of the store."""

    def __init__(self, connection: sa.Connection, run_id: str | None, query: LogQuery) -> None:
        self._connection, self._run_id = connection, run_id
        groups = Groups(connection, run_id, query.project)
        # not by the filters: the facet of runs counts those that its own filter leaves out
        node = groups.resolved(query.node, query.base)
        self.query = replace(query, node=node)
        self.base, self.whole = self.query.base, self.query.whole
        self.read_bytes = 0
        is_within = any(map(_is_within_words, leaves(node)))
        self.max_read_bytes = MAX_READ_BYTES_WITHIN_WORDS if is_within else MAX_READ_BYTES
        self._names: dict[int, str] = {}
        self._kinds = Kinds(connection)
        self._runs = RunNumbers()
        self._run_numbers: dict[str, int] = {}

    def page(
        self,
        limit: int,
        cursor: Cursor | None = None,
        *,
        is_counting: bool = True,
        is_oldest_first: bool = False,
    ) -> Found:
        """Return the newest lines after the cursor, or the oldest ones."""
        sign = -1 if is_oldest_first else 1
        page = _Page(limit, sign)
        counts = Counts(dimensions=DIMENSIONS if self._run_id is not None else OF_ALL_RUNS)
        found = Found([], counts, is_counted=is_counting)
        _PageSearch(self, page, found, cursor, sign).run()
        found.lines = page.lines(found.searched_to_ns)
        if found.searched_to_ns is not None:
            found.cursor = Cursor(found.searched_to_ns, sign * _MOST)
        elif page.is_full:
            found.cursor = Cursor(found.lines[-1].line.time_ns, found.lines[-1].id)
        return found

    def tail(self, after_id: int, limit: int) -> tuple[list[FoundLine], int, bool]:
        """Return the lines that came after another one, oldest first, with the id to go on from.

        The last is whether there were too many to look at: a reader begins anew.
        """
        block = tables.log_block.c
        newest = newest_line_id(self._connection, self._run_id, self.query.project)
        statement = self._selection([block.id >= after_id >> ID_BITS])
        rows = self._connection.execute(statement.order_by(block.id).limit(MAX_TAIL_BLOCKS + 1))
        blocks = [_Block(*row) for row in rows]
        if len(blocks) > MAX_TAIL_BLOCKS:
            return [], max(newest, after_id), True
        hits: list[FoundLine] = []
        for one, lines in self.loaded(blocks):
            mask = lines.head.ids > after_id
            if not mask.any():
                continue
            mask &= match_lines(self.whole, lines)
            for at in np.flatnonzero(mask).tolist():
                line = read_line(lines.names[lines.host], lines.names, lines.head, lines.body, at)
                hits.append(FoundLine(int(lines.head.ids[at]), one.run_id, line))
            if self.read_bytes > self.max_read_bytes:
                return [], max(newest, after_id), True
        hits.sort(key=lambda hit: hit.id)
        # A full page may leave lines out: the reader goes on from the last one it got.
        last_id = hits[limit - 1].id if len(hits) >= limit else max(newest, after_id)
        return hits[:limit], last_id, False

    def histogram(
        self, counts: Counts, start_ns: int, bucket_ns: int, num_buckets: int
    ) -> Histogram:
        """Return what was counted, by level over time."""

        def read(block_ids: list[int]) -> tuple[Array, Array]:
            rows = self._connection.execute(
                sa.select(*_COLUMNS).where(tables.log_block.c.id.in_(block_ids))
            )
            times, levels = [], []
            for _, lines in self.loaded([_Block(*row) for row in rows]):
                mask = match_lines(self.whole, lines)
                times.append(lines.head.time_ns[mask])
                levels.append(lines.head.level[mask])
            return np.concatenate(times), np.concatenate(levels)

        return counts.histogram(start_ns, bucket_ns, num_buckets, read)

    def chunks(self, within: Time | None, sign: int, *, is_counting: bool) -> Generator[_Blocks]:
        """Yield the blocks that the index and their times leave, newest or oldest first."""
        block = tables.log_block.c
        order = (
            (block.time_hi_ns.desc(), block.id.desc()) if sign > 0 else (block.time_lo_ns, block.id)
        )
        statement = self._selection([], within, is_counting=is_counting).order_by(*order)
        # As they are asked for: an answer that has its page reads no further.
        size = _FEWEST_ROWS
        with self._connection.execute(statement.execution_options(stream_results=True)) as rows:
            while part := rows.fetchmany(size):
                yield _Blocks(part)
                size = min(2 * size, _MOST_ROWS)

    def tallies(self, blocks: _Blocks) -> Tallies:
        """Return the tallies of blocks."""
        numbers, counts, at = read_tallies(blocks.tallies)
        kind = self._kinds.places(numbers)
        kinds = self._kinds.rows
        self._learn(np.concatenate([blocks.hosts, kinds[:, 3], kinds[:, 4]]))
        number_of = self._number_runs(blocks.run_ids)
        runs = np.array([number_of[run_id] for run_id in blocks.run_ids], np.int64)
        return Tallies._make([
            kind, counts, at, kinds, blocks.hosts, *blocks.bounds, runs, self._names, self._runs,
        ])  # fmt: skip

    def loaded(self, blocks: list[_Block]) -> Iterator[tuple[_Block, Lines]]:
        """Yield blocks with their lines, in their order."""
        data = tables.log_lines.c
        self._learn(np.array([block.host for block in blocks], np.int64))
        self._number_runs([block.run_id for block in blocks])
        for start in range(0, len(blocks), _FEW):
            part = blocks[start : start + _FEW]
            rows = self._connection.execute(
                sa.select(data.block_id, data.head, data.body).where(
                    data.block_id.in_([block.id for block in part])
                )
            )
            found = {row.block_id: row for row in rows}
            for block in part:
                row = found[block.id]
                yield block, self._lines(block, row)

    def _lines(self, block: _Block, row: Any) -> Lines:
        def names(head: Head) -> dict[int, str]:
            self._learn(np.concatenate([head.logger, head.stream]))
            return self._names

        def head() -> Head:
            self.read_bytes += _BYTES_OF_HEAD * block.num_lines
            return read_head(row.head, block.id)

        def body() -> Body:
            body = read_body(row.body)
            self.read_bytes += len(body.texts.data)
            return body

        run = self._run_numbers[block.run_id]
        return Lines(run, self._runs, block.host, block.num_lines, names, head, body)

    def _learn(self, words: Array) -> None:
        """Read the names of numbers of words that are not known."""
        unknown = [word for word in np.unique(words).tolist() if word not in self._names]
        self._names.update(read_words(self._connection, unknown))

    def _number_runs(self, run_ids: Sequence[str]) -> dict[str, int]:
        """Return the number of each run, and read names and projects of those that are new."""
        numbers, table = self._run_numbers, tables.run.c
        unknown = [run_id for run_id in dict.fromkeys(run_ids) if run_id not in numbers]
        for at in range(0, len(unknown), 500):  # SQLite bounds the number of parameters
            part = unknown[at : at + 500]
            rows = self._connection.execute(
                sa.select(table.run_id, table.name, table.project).where(table.run_id.in_(part))
            )
            known = {run_id: (name, project) for run_id, name, project in rows}
            for run_id in part:
                number = numbers[run_id] = len(numbers)
                self._runs.ids[number] = run_id
                self._runs.names[number], self._runs.projects[number] = known.get(run_id, ("", ""))
        return numbers

    def _selection(
        self,
        where: list[sa.ColumnElement[bool]],
        within: Time | None = None,
        *,
        is_counting: bool = False,
    ) -> sa.Select[Any]:
        block = tables.log_block.c
        where = [*where, *self._within(within)]
        if self._run_id is not None:
            where.append(block.run_id == self._run_id)
        else:
            # A count of runs leaves the runs that were chosen out of its filters.
            node = self.base if is_counting else self.whole
            where += in_visible_runs(block.run_id, node, self.query.project)
        lookup = lookup_of(self.query.node)
        if lookup is not None:
            # Not by the number itself: blocks come in the order of time, the index only sieves.
            indexed = (block.id + 0).in_(line_index.blocks_with(self._connection, lookup))
            where.append(sa.or_(block.sealed != 1, indexed))
        return sa.select(*_COLUMNS).where(*where)

    def _within(self, within: Time | None) -> Iterator[sa.ColumnElement[bool]]:
        block = tables.log_block.c
        times = [leaf for leaf in needed(self.whole) if isinstance(leaf, Time)]
        for time in (*times, within or Time()):
            if time.from_ns is not None:
                yield block.time_hi_ns >= time.from_ns
            if time.to_ns is not None:
                yield block.time_lo_ns <= time.to_ns


@dataclass(slots=True)
class _PageSearch:
    """Searches blocks in their order until the page is full and enough is counted."""

    search: Search
    page: _Page
    found: Found
    cursor: Cursor | None
    sign: int

    def run(self) -> None:
        """Fill the page and the counts."""
        within = _behind(self.cursor, self.sign)
        is_counting = self.found.is_counted
        with closing(self.search.chunks(within, self.sign, is_counting=is_counting)) as chunks:
            self._run(chunks)

    def _run(self, chunks: Iterable[_Blocks]) -> None:
        num_blocks = 0
        for chunk in chunks:
            if num_blocks >= MAX_BLOCKS:
                self.found.is_counted = False
                edge = chunk.edges(self.sign)[:1]
                if self.page.wants(edge).any():
                    self.found.searched_to_ns = int(edge[0])
                return
            num_blocks += len(chunk)
            tallies = self.search.tallies(chunk)
            base = match_tallies(self.search.base, tallies)
            may = base[0]
            if self.search.query.filters:
                may = match_tallies(self.search.whole, tallies)[0]
            is_for_page = np.bincount(tallies.at, may, len(chunk)) > 0
            is_uncertain = self._count(chunk, tallies, base)
            if not self._search(chunk, is_for_page, is_uncertain):
                return
            if not self.found.is_counted and not self.page.wants(chunk.edges(self.sign)[-1:]).any():
                return

    def _count(self, chunk: _Blocks, tallies: Tallies, base: Masks) -> Array:
        """Count what tallies show; return the blocks of which they do not show all."""
        if not self.found.is_counted:
            return np.zeros(len(chunk), bool)
        query = self.search.query
        may, must = base
        masks = {name: match_tallies(node, tallies)[0] for name, node in query.filters.items()}
        unsure = may & ~must
        for mask in masks.values():
            unsure = unsure & mask
        is_uncertain: Array = np.bincount(tallies.at, unsure, len(chunk)) > 0
        self.found.counts.add_tallies(tallies, chunk.ids, must & ~is_uncertain[tallies.at], masks)
        return is_uncertain

    def _search(self, chunk: _Blocks, is_for_page: Array, is_uncertain: Array) -> bool:
        """Search the blocks of a chunk that matter; return whether to go on."""
        edges = chunk.edges(self.sign)
        left = np.flatnonzero(is_for_page | is_uncertain)
        size = 2
        while True:
            left = left[is_uncertain[left] | self.page.wants(edges[left])]
            if not len(left):
                return True
            group, left, size = left[:size], left[size:], min(2 * size, _FEW)
            for at, (block, lines) in zip(
                group.tolist(), self.search.loaded([chunk[at] for at in group]), strict=True
            ):
                edge = edges[at : at + 1]
                if not is_uncertain[at] and not self.page.wants(edge).any():
                    continue  # the page was filled by the blocks that were read with it
                if self._is_enough(edge):
                    return False
                self._search_block(block, lines, bool(is_uncertain[at]))

    def _is_enough(self, edge: Array) -> bool:
        """Return whether to stop before a block; what is left out is noted."""
        found, read_bytes = self.found, self.search.read_bytes
        if self.page.wants(edge).any():
            if read_bytes <= self.search.max_read_bytes:
                return False
            found.searched_to_ns, found.is_counted = int(edge[0]), False
            return True
        if read_bytes > COUNT_READ_BYTES or found.counts.total > COUNT_LINES:
            found.is_counted = False
        return not found.is_counted

    def _search_block(self, block: _Block, lines: Lines, is_uncertain: bool) -> None:
        query = self.search.query
        masks = {name: match_lines(node, lines) for name, node in query.filters.items()}
        base = match_lines(self.search.base, lines)
        chosen = np.ones(len(lines), bool)
        for mask in masks.values():
            chosen &= mask
        if not base.any() or (not is_uncertain and not chosen.any()):
            return
        chosen &= _in_order(lines.head, self.cursor, self.sign)
        if is_uncertain and self.found.is_counted:
            self.found.counts.add_lines(lines, base, masks)
        hits = np.flatnonzero(base & chosen)
        if hits.size and self.page.wants(np.array([self._edge(block)])).any():
            self.page.add(block, lines, hits)

    def _edge(self, block: _Block) -> int:
        return block.time_hi_ns if self.sign > 0 else block.time_lo_ns


def newest_line_id(
    connection: sa.Connection, run_id: str | None, project: str | None = None
) -> int:
    """Return the id of the line that came last, of a run or of all of a project; 0 for none."""
    block, data, run = tables.log_block.c, tables.log_lines.c, tables.run.c
    newest = sa.select(sa.func.max(block.id))
    if run_id is not None:
        newest = newest.where(block.run_id == run_id)
    elif project is not None:  # of each run by the index, however much others have
        of_run = newest.where(block.run_id == run.run_id).correlate(tables.run).scalar_subquery()
        newest = sa.select(sa.func.max(of_run)).where(run.project == project)
    row = connection.execute(
        sa.select(data.block_id, data.head).where(data.block_id == newest.scalar_subquery())
    ).first()
    return 0 if row is None else int(read_head(row.head, row.block_id).ids[-1])


def find_line(connection: sa.Connection, run_id: str, line_id: int) -> FoundLine | None:
    """Return a line by its id; None where the run has none of it."""
    block, data, word = tables.log_block.c, tables.log_lines.c, tables.log_word.c
    row_id = line_id >> ID_BITS
    first = sa.case((block.first_row == 0, block.id), else_=block.first_row)
    rows = connection.execute(
        sa.select(block.id, word.word, data.head, data.body)
        .join_from(tables.log_block, tables.log_lines, block.id == data.block_id)
        .join(tables.log_word, word.id == block.host)
        .where(block.run_id == run_id, block.id >= row_id, first <= row_id)
        .order_by(block.id)
    )
    for block_id, host, head_data, body_data in rows:
        head = read_head(head_data, block_id)
        if len(places := np.flatnonzero(head.ids == line_id)):
            at = int(places[0])
            words = [int(head.logger[at]), int(head.stream[at])]
            names = read_words(connection, words)
            line = read_line(host, names, head, read_body(body_data), at)
            return FoundLine(line_id, run_id, line)
    return None


def _is_within_words(leaf: Node) -> bool:
    return isinstance(leaf, Regex) or (isinstance(leaf, Text) and leaf.is_open_left)


def _behind(cursor: Cursor | None, sign: int) -> Time | None:
    if cursor is None:
        return None
    return Time(None, cursor.time_ns) if sign > 0 else Time(cursor.time_ns, None)


def _in_order(head: Head, cursor: Cursor | None, sign: int) -> Array:
    """Return which lines come after the cursor."""
    if cursor is None:
        return np.ones(len(head.ids), bool)
    times, ids = sign * head.time_ns, sign * head.ids
    time, line_id = sign * cursor.time_ns, sign * cursor.line_id
    mask: Array = (times < time) | ((times == time) & (ids < line_id))
    return mask
