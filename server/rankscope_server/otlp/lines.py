"""Log records as lines of ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rankscope_server.otlp.attributes import STEP, number_of, rank_of, text_of, value_of, values_of
from rankscope_server.otlp.book import Book
from rankscope_server.otlp.parts import Part, Resource, is_time, items, started

# the first number of each range of the data model, and the level that it is here
_LEVELS = (
    (21, logging.CRITICAL), (17, logging.ERROR), (13, logging.WARNING), (9, logging.INFO),
    (5, logging.DEBUG), (1, logging.DEBUG // 2),
)  # fmt: skip
_BAD_TIME = "at no time"


def take_lines(resources: Sequence[Resource], part: Part, book: Book, now_ns: int) -> None:
    """Add what log records are to a part."""
    for resource in resources:
        origin = resource.origin
        for scope, record in items(resource, "log_records"):
            time_ns = int(record.time_unix_nano or record.observed_time_unix_nano or now_ns)
            if not is_time(time_ns):
                part.said.refused[_BAD_TIME] += 1
                continue
            values = values_of(record.attributes)
            rank = rank_of(values)
            if rank < 0 and "replica_id" not in values:
                rank = origin.rank
                rank = rank if rank >= 0 else book.rank_of(part.run_id, origin.instance)
            if not part.records:
                part.records.append(started(origin, time_ns))
            ids = {"trace_id": record.trace_id.hex(), "span_id": record.span_id.hex()}
            part.line(
                origin, rank, time_ns, level_of(record), _message(record, values), scope,
                values | {name: id for name, id in ids.items() if id}, number_of(values, STEP),
            )  # fmt: skip


def level_of(record: Any) -> int:
    """Return the level of the logging module that a severity is."""
    number = int(record.severity_number)
    for first, level in _LEVELS:
        if number >= first:
            return level
    named = logging.getLevelNamesMapping().get(record.severity_text.upper())
    return logging.INFO if named is None else named


def _message(record: Any, values: dict[str, Any]) -> str:
    body = value_of(record.body)
    text = "" if body is None else text_of(body)
    trace = text_of(values.pop("exception.stacktrace", ""))
    return "\n".join(part for part in (text or record.event_name, trace) if part)
