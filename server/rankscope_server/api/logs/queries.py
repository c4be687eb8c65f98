"""Pages of log lines with histogram and facets, lines around a line, the search over all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import MAX_RANK
from rankscope_server.answers import of_row, to_ms
from rankscope_server.api.logs.schema import (
    FoundRun,
    LogContext,
    LogFacets,
    LogHistogram,
    LogRow,
    Logs,
    SearchAnswer,
    SearchFacets,
)
from rankscope_server.api.parameters import items, to_ns
from rankscope_server.api.runs.queries import status_of
from rankscope_server.problems import Problem, not_found
from rankscope_server.search.filters import level_range
from rankscope_server.search.parse import parse
from rankscope_server.search.tree import And, Name, Names, Node, Numbers, Or, QueryError, Text
from rankscope_server.store import tables
from rankscope_server.store.line_counts import Counts
from rankscope_server.store.search import (
    Cursor,
    Found,
    FoundLine,
    LogQuery,
    Search,
    find_line,
    newest_line_id,
)
from rankscope_server.text import LEVELS, level_name

MAX_LIMIT = 5_000
MAX_CONTEXT = 200
MAX_FACET_VALUES = 100
HISTOGRAM_BUCKETS = 60
MIN_HISTOGRAM_NS = 10 * 10**9  # lines of one moment stand in the middle of some seconds
FOLD_WITHIN_MS = 2_000
_BUCKETS_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000,
    600_000, 1_800_000, 3_600_000,
)  # fmt: skip
_NO_FACETS = LogFacets(rank=[], level=[], host=[], logger=[], stream=[])
_NO_SEARCH_FACETS = SearchFacets(
    rank=[], level=[], host=[], logger=[], stream=[], run=[], project=[]
)


def logs(
    connection: sa.Connection,
    run_id: str,
    query: LogQuery,
    limit: int,
    cursor: str | None = None,
    fold: bool = True,
) -> Logs:
    """Return a page, newest first. Only the first one has counts. Raises Problem 422."""
    with _pointing():
        search = Search(connection, run_id, query)
    found = search.page(limit, _parse_cursor(cursor), is_counting=cursor is None)
    rows = [_row(line) for line in found.lines]
    return Logs(
        total=max(found.counts.total, len(rows)),
        is_at_least=not found.is_counted,
        lines=fold_rows(rows) if fold else rows,
        histogram=_histogram(search, found.counts),
        facets=_facets(found.counts),
        next_cursor=_cursor(found),
        last_id=newest_line_id(connection, run_id),
        searched_to_ms=to_ms(found.searched_to_ns),
        is_behind=False,
        suggestion=None,
    )


def tail(
    connection: sa.Connection, run_id: str, query: LogQuery, after_id: int, limit: int
) -> Logs:
    """Return what came after a line, oldest first. Raises Problem 422."""
    with _pointing():
        search = Search(connection, run_id, query)
    lines, last_id, is_behind = search.tail(after_id, limit)
    return Logs(
        total=len(lines), is_at_least=is_behind, lines=[_row(line) for line in lines],
        histogram=None, facets=_NO_FACETS, next_cursor=None, last_id=last_id,
        searched_to_ms=None, is_behind=is_behind, suggestion=None,
    )  # fmt: skip


def with_suggestion(
    connection: sa.Connection, run_id: str, text: str, query: LogQuery, answer: Logs
) -> Logs:
    """Return an answer without lines with a wider query beside it, where that finds something.

    The wider one looks for its words within words too.
    """
    wider = text
    for leaf in reversed(_words(query.node)):
        start, end = leaf.place.start, leaf.place.end
        wider = f"{wider[:start]}*{wider[start:end].strip('*')}*{wider[end:]}"
    try:
        node = parse(wider, 0)
    except QueryError:
        return answer
    if wider == text or answer.searched_to_ms is not None:
        return answer
    found = Search(connection, run_id, replace(query, node=node)).page(1, is_counting=False)
    return msgspec.structs.replace(answer, suggestion=wider) if found.lines else answer


def context(
    connection: sa.Connection, run_id: str, line_id: int, num_lines: int, everyone: bool
) -> LogContext:
    """Return the lines before and after one, of its rank or of all. Raises Problem 404."""
    found = find_line(connection, run_id, line_id)
    if found is None:
        raise not_found(f"run {run_id} has no line {line_id}", "it may have been removed", "id")
    line = found.line
    node = And() if everyone else And((
        Numbers("rank", ((line.rank, line.rank),)),
        Numbers("attempt", ((line.attempt, line.attempt),)),
        *([Names("host", (line.host,))] if line.rank < 0 else []),
    ))  # fmt: skip
    search = Search(connection, run_id, LogQuery(node))
    place = Cursor(line.time_ns, line_id)
    before, after = list[FoundLine](), list[FoundLine]()
    if num_lines:
        before = search.page(num_lines, place, is_counting=False).lines[::-1]
        after = search.page(num_lines, place, is_counting=False, is_oldest_first=True).lines
    rows = [_row(one) for one in (*before, found, *after)]
    return LogContext(line=_row(found), lines=rows)


def search(
    connection: sa.Connection,
    query: LogQuery,
    limit: int,
    cursor: str | None = None,
    fold: bool = True,
) -> SearchAnswer:
    """Return the newest lines of all runs that match; the first page has counts.

    Raises Problem 422.
    """
    with _pointing():
        search = Search(connection, None, query)
    found = search.page(limit, _parse_cursor(cursor), is_counting=cursor is None)
    rows = [_row(line) for line in found.lines]
    return SearchAnswer(
        total=max(found.counts.total, len(rows)),
        is_at_least=not found.is_counted,
        lines=fold_rows(rows) if fold else rows,
        runs=_runs_of(connection, rows, _top(found.counts.facet("run"))),
        histogram=_histogram(search, found.counts),
        facets=_search_facets(found.counts),
        next_cursor=_cursor(found),
        last_id=newest_line_id(connection, None, query.project),
        searched_to_ms=to_ms(found.searched_to_ns),
        is_behind=False,
    )


def search_tail(
    connection: sa.Connection, query: LogQuery, after_id: int, limit: int
) -> SearchAnswer:
    """Return what came after a line in all runs, oldest first. Raises Problem 422."""
    with _pointing():
        search = Search(connection, None, query)
    lines, last_id, is_behind = search.tail(after_id, limit)
    rows = [_row(line) for line in lines]
    return SearchAnswer(
        total=len(rows), is_at_least=is_behind, lines=rows, runs=_runs_of(connection, rows, []),
        histogram=None, facets=_NO_SEARCH_FACETS, next_cursor=None, last_id=last_id,
        searched_to_ms=None, is_behind=is_behind,
    )  # fmt: skip


def _runs_of(
    connection: sa.Connection, rows: list[LogRow], counted: list[tuple[str, int]]
) -> list[FoundRun]:
    counts, table = Counter(row.run_id for row in rows), tables.run.c
    counts.update({run_id: 0 for run_id, _ in counted})
    names = sa.select(table.run_id, table.name, table.status).where(table.run_id.in_(counts))
    found = [
        FoundRun(row.run_id, row.name or row.run_id, status_of(row.status), counts[row.run_id])
        for row in connection.execute(names)
    ]
    return sorted(found, key=lambda run: (-run.lines, run.run_id))


def parse_box(q: str, now_ns: int) -> Node:
    """Return the tree of the search box. Raises Problem 422 that points at the character."""
    with _pointing():
        return parse(q, now_ns)


def parse_filters(
    rank: str = "",
    host: str = "",
    level: str = "",
    min_level: str = "",
    stream: str = "",
    logger: str = "",
    run: str = "",
    project: str = "",
) -> dict[str, Node]:
    """Return the filters that parameters of a request ask for. Raises Problem 422."""
    filters: dict[str, Node] = {}
    if ranks := _parse_ranks(rank):
        filters["rank"] = Numbers("rank", ranks)
    if levels := tuple(_level_range(name) for name in items(level)):
        filters["level"] = Numbers("level", levels)
    if min_level:
        filters["level"] = Numbers("level", ((_level_range(min_level)[0], 1 << 30),))
    names: dict[Name, str] = {
        "host": host, "stream": stream, "logger": logger, "run": run, "project": project,
    }  # fmt: skip
    filters |= {
        name: Names(name, tuple(items(text))) for name, text in names.items() if items(text)
    }
    return filters


def log_query(
    node: Node, filters: dict[str, Node], from_ms: float | None, to_ms: float | None
) -> LogQuery:
    """Return the query of a request."""
    return LogQuery(node, filters, to_ns(from_ms), to_ns(to_ms))


def fold_rows(rows: list[LogRow]) -> list[LogRow]:
    """Join lines alike into one: of one rank or of several, each within two seconds of another."""
    folded: list[LogRow] = []
    places: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = (row.run_id, row.attempt, row.level, row.logger, row.stream, row.message)
        at = places.get(key)
        if at is not None and abs(folded[at].first_ms - row.time_ms) <= FOLD_WITHIN_MS:
            folded[at] = _joined(folded[at], row)
            continue
        places[key] = len(folded)
        folded.append(row)
    return folded


def _joined(first: LogRow, row: LogRow) -> LogRow:
    ranks = sorted({*first.ranks, row.rank})
    return msgspec.structs.replace(
        first, count=first.count + 1, ranks=ranks, first_ms=min(first.first_ms, row.time_ms)
    )


def _words(node: Node) -> list[Text]:
    """Return the words that must be found, in the order in which they were written."""
    if isinstance(node, And | Or):
        return [word for child in node.nodes for word in _words(child)]
    if isinstance(node, Text) and not (node.is_open_left and node.is_open_right):
        return [node]
    return []


@contextmanager
def _pointing() -> Iterator[None]:
    """Turn a mistake in the search box into an answer that points at it."""
    try:
        yield
    except QueryError as error:
        at = (error.place.start, error.place.end)
        raise Problem(422, error.what, "q", error.remedy, at=at) from error


def _cursor(found: Found) -> str | None:
    return None if found.cursor is None else f"{found.cursor.time_ns}.{found.cursor.line_id}"


def _parse_cursor(cursor: str | None) -> Cursor | None:
    if not cursor:
        return None
    time, _, line_id = cursor.partition(".")
    if not (time.isdigit() and line_id.isdigit() and len(cursor) < 45):
        raise Problem(422, "not a cursor of this server", "cursor", "use next_cursor as it came")
    return Cursor(min(int(time), (1 << 63) - 1), min(int(line_id), (1 << 63) - 1))


def _row(found: FoundLine) -> LogRow:
    line = found.line
    return of_row(
        LogRow,
        line,
        id=found.id,
        run_id=found.run_id,
        level=level_name(line.level),
        count=1,
        first_ms=line.time_ns / 1e6,
        ranks=[line.rank],
    )


def _histogram(search: Search, counts: Counts) -> LogHistogram | None:
    span = counts.span()
    if span is None:
        return None
    query = search.query
    beside_ns = max(MIN_HISTOGRAM_NS - (span[1] - span[0]), 0) // 2
    lo_ms = (query.from_ns if query.from_ns is not None else span[0] - beside_ns) // 10**6
    hi_ms = (query.to_ns if query.to_ns is not None else span[1] + beside_ns) // 10**6
    wanted_ms = max(hi_ms - lo_ms, 1) / HISTOGRAM_BUCKETS
    bucket_ms = next((size for size in _BUCKETS_MS if size >= wanted_ms), None)
    bucket_ms = bucket_ms or _BUCKETS_MS[-1] * int(np.ceil(wanted_ms / _BUCKETS_MS[-1]))
    start_ms = lo_ms // bucket_ms * bucket_ms
    num_buckets = (hi_ms - start_ms) // bucket_ms + 1
    found = search.histogram(counts, start_ms * 10**6, bucket_ms * 10**6, num_buckets)
    levels: dict[str, list[int]] = {}
    for name in LEVELS:
        parts = [sums for level, sums in found.levels.items() if level_name(level) == name]
        if parts:
            levels[name] = np.sum(parts, axis=0).astype(int).tolist()
    return LogHistogram(
        from_ms=float(start_ms), to_ms=float(start_ms + num_buckets * bucket_ms),
        bucket_ms=float(bucket_ms), levels=levels, is_exact=found.is_exact,
    )  # fmt: skip


def _search_facets(counts: Counts) -> SearchFacets:
    return SearchFacets(
        **msgspec.structs.asdict(_facets(counts)),
        run=_top(counts.facet("run")),
        project=_top(counts.facet("project")),
    )


def _facets(counts: Counts) -> LogFacets:
    levels: dict[str, int] = {}
    for level, count in counts.facet("level").items():
        levels[level_name(level)] = levels.get(level_name(level), 0) + count
    return LogFacets(
        rank=_top(counts.facet("rank")),
        level=[(name, levels[name]) for name in LEVELS if name in levels],
        host=_top(counts.facet("host")),
        logger=_top(counts.facet("logger")),
        stream=_top(counts.facet("stream")),
    )


def _top(counts: dict[Any, int]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_FACET_VALUES]


def _level_range(name: str) -> tuple[int, int]:
    known = level_range(name.strip())
    if known is None:
        raise Problem(422, f"level {name[:20]!r} is not known", "level", f"use {', '.join(LEVELS)}")
    return known


def _parse_ranks(text: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for item in items(text):
        lo, dash, hi = item.partition("-") if not item.startswith("-") else (item, "", "")
        try:
            ends = int(lo), int(hi) if dash else int(lo)
        except ValueError as error:
            raise Problem(422, f"{item[:20]!r} is not a rank", "rank", "use 0,2 or 4-7") from error
        if max(map(abs, ends)) > MAX_RANK:
            raise Problem(422, f"rank {item[:20]} is out of range", "rank", f"use 0 to {MAX_RANK}")
        ranges.append(ends)
    return tuple(ranges)
