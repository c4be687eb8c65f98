"""Pages of log lines with histogram and facets; the search over all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import Capped, of_row
from rankscope_server.api.logs.schema import LogFacets, LogHistogram, LogRow, Logs, SearchAnswer
from rankscope_server.api.parameters import items, to_ns
from rankscope_server.ingest.records import MAX_RANK
from rankscope_server.problems import Problem
from rankscope_server.store.lines import Line
from rankscope_server.store.search import LogQuery, Matches, fetch, find, newest_line_id, words_of
from rankscope_server.text import LEVEL_BOUNDS, LEVELS, level_name

MAX_LIMIT = 5_000
MAX_FACET_VALUES = 100
HISTOGRAM_BUCKETS = 60
FOLD_WITHIN_NS = 2_000_000_000
_BUCKETS_MS = tuple(
    float(size)
    for size in "1 2 5 10 20 50 100 200 500 1e3 2e3 5e3 1e4 3e4 6e4 3e5 6e5 18e5 36e5".split()
)


def logs(
    connection: sa.Connection,
    run_id: str,
    query: LogQuery,
    limit: int,
    cursor: str | None,
    fold: bool,
) -> Logs:
    """Return a page, newest first; with `query.after_id` what came later, oldest first."""
    limit = min(max(limit, 1), MAX_LIMIT)
    matches = find(connection, run_id, query)
    newest = newest_line_id(connection, run_id)
    if query.after_id is not None:
        ids = np.sort(matches.ids)[:limit].tolist()
        # A full page may leave lines out: the reader continues from the last one it got.
        last_id = ids[-1] if len(ids) == limit else max(newest, query.after_id)
        rows = _rows(connection, ids)
        return Logs(
            total=len(matches.ids), lines=rows, histogram=None, facets=_facets(matches),
            next_cursor=None, last_id=last_id, capped=_capped(matches),
        )  # fmt: skip
    ids, next_cursor = _page(matches, limit, cursor)
    rows = _rows(connection, ids)
    return Logs(
        total=len(matches.ids),
        lines=fold_rows(rows) if fold else rows,
        histogram=_histogram(matches, query),
        facets=_facets(matches),
        next_cursor=next_cursor,
        last_id=newest,
        capped=_capped(matches),
    )


def search(connection: sa.Connection, project: str | None, text: str, limit: int) -> SearchAnswer:
    """Return the newest lines of all runs of a project that hold `text`."""
    limit = min(max(limit, 1), MAX_LIMIT)
    matches = find(connection, None, LogQuery(words=words_of(text), project=project))
    ids, _ = _page(matches, limit, None)
    return SearchAnswer(
        total=len(matches.ids), lines=fold_rows(_rows(connection, ids)), capped=_capped(matches)
    )


def parse_query(
    q: str = "",
    rank: str = "",
    host: str = "",
    level: str = "",
    min_level: str = "",
    stream: str = "",
    logger: str = "",
    from_ms: float | None = None,
    to_ms: float | None = None,
    after: int | None = None,
) -> LogQuery:
    """Return the query that the parameters of a request ask for. Raises Problem 422."""
    query = LogQuery(
        words=words_of(q),
        ranks=_parse_ranks(rank),
        levels=tuple(_level_range(name) for name in items(level)),
        hosts=tuple(items(host)),
        loggers=tuple(items(logger)),
        streams=tuple(items(stream)),
        from_ns=to_ns(from_ms),
        to_ns=to_ns(to_ms),
        after_id=after,
    )
    if min_level:
        query = replace(query, levels=((_level_range(min_level)[0], 1 << 30),))
    return query


def fold_rows(rows: list[LogRow]) -> list[LogRow]:
    """Join lines that several ranks wrote alike within two seconds into one."""
    folded: list[LogRow] = []
    places: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = (row.run_id, row.attempt, row.level, row.logger, row.stream, row.message)
        at = places.get(key)
        if at is not None:
            first = folded[at]
            near = abs(first.time_ms - row.time_ms) * 1e6 <= FOLD_WITHIN_NS
            if near and row.rank not in first.ranks:
                folded[at] = _joined(first, row)
                continue
        places[key] = len(folded)
        folded.append(row)
    return folded


def _joined(first: LogRow, row: LogRow) -> LogRow:
    ranks = sorted([*first.ranks, row.rank])
    return msgspec.structs.replace(first, count=first.count + 1, ranks=ranks)


def _page(matches: Matches, limit: int, cursor: str | None) -> tuple[list[int], str | None]:
    ids, times = matches.ids, matches.times
    if cursor:
        time, line_id = _parse_cursor(cursor)
        older = (times < time) | ((times == time) & (ids < line_id))
        ids, times = ids[older], times[older]
    order = np.lexsort((-ids, -times))[:limit]
    page = ids[order].tolist()
    if len(page) == len(ids) or not page:
        return page, None
    return page, f"{times[order[-1]]}.{page[-1]}"


def _parse_cursor(cursor: str) -> tuple[int, int]:
    time, _, line_id = cursor.partition(".")
    if not (time.isdigit() and line_id.isdigit() and len(cursor) < 45):
        raise Problem(422, "not a cursor of this server", "cursor", "use next_cursor as it came")
    return int(time), int(line_id)


def _rows(connection: sa.Connection, ids: list[int]) -> list[LogRow]:
    lines = fetch(connection, ids)
    return [_row(line_id, *lines[line_id]) for line_id in ids if line_id in lines]


def _row(line_id: int, run_id: str, line: Line) -> LogRow:
    return of_row(
        LogRow,
        line,
        id=line_id,
        run_id=run_id,
        level=level_name(line.level),
        count=1,
        ranks=[line.rank],
    )


def _histogram(matches: Matches, query: LogQuery) -> LogHistogram | None:
    if not len(matches.times):
        return None
    lo = (query.from_ns if query.from_ns is not None else int(matches.times.min())) / 1e6
    hi = (query.to_ns if query.to_ns is not None else int(matches.times.max())) / 1e6
    span = max(hi - lo, 1.0)
    bucket = next((size for size in _BUCKETS_MS if span / size <= HISTOGRAM_BUCKETS), None)
    bucket = float(bucket or 36e5 * np.ceil(span / 36e5 / HISTOGRAM_BUCKETS))
    start = np.floor(lo / bucket) * bucket
    count = int((hi - start) // bucket) + 1
    places = np.clip(((matches.times / 1e6 - start) // bucket).astype(np.int64), 0, count - 1)
    levels = {}
    for name in LEVELS:
        least, most = _level_range(name)
        chosen = places[(matches.levels >= least) & (matches.levels <= most)]
        if len(chosen):
            levels[name] = np.bincount(chosen, minlength=count).tolist()
    return LogHistogram(
        from_ms=float(start), to_ms=float(start + count * bucket), bucket_ms=bucket, levels=levels
    )


def _facets(matches: Matches) -> LogFacets:
    facets = matches.facets
    levels: dict[str, int] = {}
    for level, count in facets["level"].items():
        levels[level_name(level)] = levels.get(level_name(level), 0) + count
    return LogFacets(
        rank=_top(facets["rank"]),
        level=[(name, levels[name]) for name in LEVELS if name in levels],
        host=_top(facets["host"]),
        logger=_top(facets["logger"]),
        stream=_top(facets["stream"]),
    )


def _top(counts: dict[Any, int]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_FACET_VALUES]


def _capped(matches: Matches) -> Capped | None:
    # How many lines are in blocks that were not searched is not known: at least one more.
    total = len(matches.ids)
    return Capped(shown=total, total=total + 1) if matches.is_cut else None


def _level_range(name: str) -> tuple[int, int]:
    upper = name.strip().upper()
    upper = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(upper, upper)
    if upper not in LEVEL_BOUNDS:
        raise Problem(422, f"level {name[:20]!r} is not known", "level", f"use {', '.join(LEVELS)}")
    place = LEVELS.index(upper)
    most = LEVEL_BOUNDS[LEVELS[place - 1]] - 1 if place else 1 << 30
    return LEVEL_BOUNDS[upper], most


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
