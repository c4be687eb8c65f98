"""Answers about log lines."""

from __future__ import annotations

from rankscope_server.answers import Schema
from rankscope_server.api.runs.schema import RunStatus


class LogRow(Schema, frozen=True):
    """One line, or several alike: how many, from when on, of which ranks."""

    id: int
    time_ms: float
    run_id: str
    attempt: int
    rank: int
    host: str
    level: str
    logger: str
    stream: str
    message: str
    step: int
    fields: dict[str, str]
    count: int
    first_ms: float
    ranks: list[int]


class LogHistogram(Schema, frozen=True):
    """Lines per level and slice of time."""

    from_ms: float
    to_ms: float
    bucket_ms: float
    levels: dict[str, list[int]]
    is_exact: bool


class LogFacets(Schema, frozen=True):
    """How many lines each value would give, its own filter left out."""

    rank: list[tuple[int, int]]
    level: list[tuple[str, int]]
    host: list[tuple[str, int]]
    logger: list[tuple[str, int]]
    stream: list[tuple[str, int]]


class Logs(Schema, frozen=True):
    """A page of lines, newest first; with `after` oldest first.

    With `is_at_least` the counts are those of the newest lines that match: there are more.
    """

    total: int
    is_at_least: bool
    lines: list[LogRow]
    histogram: LogHistogram | None
    facets: LogFacets
    next_cursor: str | None
    last_id: int
    searched_to_ms: float | None  # lines before were not searched; the next page goes on there
    is_behind: bool  # of `after`: more came than one answer looks at
    suggestion: str | None  # a wider query that finds something, where this one finds nothing


class LogContext(Schema, frozen=True):
    """A line with those around it, oldest first."""

    line: LogRow
    lines: list[LogRow]


class FoundRun(Schema, frozen=True):
    """A run that lines of a page or of the counts are of, and how many of the page."""

    run_id: str
    name: str
    status: RunStatus
    lines: int


class SearchFacets(LogFacets, frozen=True):
    """The same over all runs; runs by their ids."""

    run: list[tuple[str, int]]
    project: list[tuple[str, int]]


class SearchAnswer(Schema, frozen=True):
    """Lines of all runs, newest first; with `after` oldest first.

    `runs` are those of the lines, most first, then others of the facets. Counts are as in `Logs`.
    """

    total: int
    is_at_least: bool
    lines: list[LogRow]
    runs: list[FoundRun]
    histogram: LogHistogram | None
    facets: SearchFacets
    next_cursor: str | None
    last_id: int
    searched_to_ms: float | None
    is_behind: bool
