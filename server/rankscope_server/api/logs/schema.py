"""Answers about log lines."""

from __future__ import annotations

from rankscope_server.answers import Capped, Schema


class LogRow(Schema, frozen=True):
    """One line, or one that several ranks wrote alike."""

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
    ranks: list[int]


class LogHistogram(Schema, frozen=True):
    """Lines per level and slice of time."""

    from_ms: float
    to_ms: float
    bucket_ms: float
    levels: dict[str, list[int]]


class LogFacets(Schema, frozen=True):
    """How many lines each value would give, its own filter left out."""

    rank: list[tuple[int, int]]
    level: list[tuple[str, int]]
    host: list[tuple[str, int]]
    logger: list[tuple[str, int]]
    stream: list[tuple[str, int]]


class Logs(Schema, frozen=True):
    """A page of lines, newest first; with `after` oldest first."""

    total: int
    lines: list[LogRow]
    histogram: LogHistogram | None
    facets: LogFacets
    next_cursor: str | None
    last_id: int
    capped: Capped | None = None


class SearchAnswer(Schema, frozen=True):
    """Lines of all runs, newest first."""

    total: int
    lines: list[LogRow]
    capped: Capped | None = None
