"""Stores the sparse records of a batch, kind by kind."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.metric_names import PRINTED_LOSS
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.ingest.printed_loss import printed_loss
from rankscope_server.ingest.step_metrics import metrics_of_device
from rankscope_server.store import tables
from rankscope_server.store.commands import store_answer
from rankscope_server.store.engine import upsert
from rankscope_server.store.lines import Line
from rankscope_server.store.packing import pack
from rankscope_server.store.ranks import RankRows
from rankscope_server.store.unit import Unit

# Numbers, addresses and quoted names differ between ranks that failed in the same way.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b\d+(?:\.\d+)*\b|(['\"]).{1,200}?\1")
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\S+)')
FINGERPRINT_RULE = "same exception type, message without numbers and names, innermost frame"


class _Sink:
    """What the handlers of one batch share."""

    def __init__(
        self, unit: Unit, batch: ValidatedBatch, ids: tuple[int, int], ranks: RankRows
    ) -> None:
        self.connection, self.tiles = unit.connection, unit.tiles
        self.run_id, self.host = batch.run_id, batch.host
        self.producer_id, self.batch_id = ids
        self.ranks = ranks
        self.lines: list[Line] = []
        self.rows: dict[sa.Table, list[dict[str, Any]]] = {}
        self.changed: set[str] = set()

    def add(self, table: sa.Table, **values: Any) -> None:
        """Add a row of this run."""
        self.rows.setdefault(table, []).append({"run_id": self.run_id, **values})

    def row(self, table: sa.Table, record: schema.Record, **values: Any) -> None:
        """Add a row that begins with run, attempt, rank and time."""
        base = {"attempt": record.attempt, "rank": record.rank, "time_ns": record.time_ns}
        self.add(table, **base, **values)


def store_records(
    unit: Unit, batch: ValidatedBatch, ids: tuple[int, int], ranks: RankRows
) -> tuple[set[str], int]:
    """Store the records of a batch; return the topics that changed and how many lines it had.

    `ids` are those of its producer and its own.
    """
    sink = _Sink(unit, batch, ids, ranks)
    if lines := [record for record in batch.records if type(record) is schema.LogLine]:
        _logs(sink, lines)
    for record in batch.records:
        if type(record) is schema.LogLine:
            continue
        if record.rank < 0 or isinstance(record, schema.RankEnded):
            ranks.attempt_seen(record.attempt, record.time_ns)
        else:
            step = getattr(record, "step", 0)
            ranks.seen(record.attempt, record.rank, record.time_ns, step)
        _HANDLERS[type(record)](sink, record)
    for table, rows in sink.rows.items():
        if table in _REPLACED:
            upsert(sink.connection, table, rows, _REPLACED[table])
        else:
            sink.connection.execute(sa.insert(table), rows)
    unit.lines.add(batch.run_id, sink.host, sink.lines)
    return sink.changed, len(sink.lines)


def fingerprint(record: schema.ErrorRaised) -> str:
    """Return what errors of the same cause have in common, as 16 hexadecimal digits."""
    frames = _FRAME.findall(record.traceback)
    first_line = record.message.strip().splitlines()[:1]
    message = _VARIABLE.sub("#", first_line[0][:500]) if first_line else ""
    parts = (record.type, message, *(frames[-1] if frames else ()))
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def _run(sink: _Sink, record: schema.RunStarted) -> None:
    sink.changed.add("run")


def _rank(sink: _Sink, record: schema.RankRegistered) -> None:
    sink.ranks.register(record)
    sink.changed.add("ranks")


def _rank_end(sink: _Sink, record: schema.RankEnded) -> None:
    is_news = sink.ranks.end(record)
    sink.changed.add("ranks")
    if is_news and record.reason != "clean":
        text = f"rank {record.rank} ended: {record.reason}"
        _line(sink, record, logging.ERROR, "event", "rankscope", f"{text} {record.detail}".strip())


def _state(sink: _Sink, record: schema.RankState) -> None:
    sink.ranks.state(record)
    sink.changed.add("ranks")


def _group(sink: _Sink, record: schema.GroupDefined) -> None:
    row = {
        "run_id": sink.run_id, "attempt": record.attempt, "group": record.group,
        "ranks": msgspec.json.encode(record.ranks).decode(), "backend": record.backend,
        "description": record.description,
    }  # fmt: skip
    upsert(sink.connection, tables.process_group, [row])
    sink.changed.add("ranks")


def _environment(sink: _Sink, record: schema.Environment) -> None:
    sink.row(tables.environment, record, facts=pack(json.dumps(record.facts).encode()))
    sink.changed.add("environment")


def _logs(sink: _Sink, records: list[schema.LogLine]) -> None:
    """Take log lines, all at once: there are many."""
    sink.changed.add("logs")
    host, lines = sink.host, sink.lines
    of_ranks: dict[tuple[int, int], list[schema.LogLine]] = {}
    for one in records:
        lines.append(
            Line(
                one.time_ns, one.level, one.attempt, one.rank, one.step, host, one.logger,
                one.stream, one.message, one.fields,
            )
        )  # fmt: skip
        of_ranks.setdefault((one.attempt, one.rank), []).append(one)
        if "loss" in one.message.lower():
            _printed(sink, one)
    for (attempt, rank), of_rank in of_ranks.items():
        times = [line.time_ns for line in of_rank]
        if rank < 0:
            for time_ns in (min(times), max(times)):
                sink.ranks.attempt_seen(attempt, time_ns)
            continue
        steps = [line.step for line in of_rank if line.step] or [0]
        sink.ranks.seen(attempt, rank, min(times), min(steps))
        sink.ranks.seen(attempt, rank, max(times), max(steps))


def _printed(sink: _Sink, record: schema.LogLine) -> None:
    if (printed := printed_loss(record)) is not None:
        number = printed.value if math.isfinite(printed.value) else None
        step = printed.step or record.step
        _number(sink, record, PRINTED_LOSS, step, number)
        sink.changed.add("metrics")


def _error(sink: _Sink, record: schema.ErrorRaised) -> None:
    sink.row(
        tables.error_event,
        record,
        fingerprint=fingerprint(record),
        step=record.step,
        type=record.type,
        message=record.message,
        traceback=record.traceback,
        place=record.where,
    )
    text = f"{record.type}: {record.message}\n{record.traceback}".rstrip()
    _line(sink, record, logging.ERROR, "error", "rankscope", text, record.step)
    sink.changed.add("errors")


def _number(sink: _Sink, record: schema.Record, name: str, step: int, value: float | None) -> None:
    batch_id = sink.batch_id
    sink.row(tables.metric, record, name=name, step=step, value=value, batch_id=batch_id)


def _metrics(sink: _Sink, record: schema.Metrics) -> None:
    for name, value in record.values.items():
        number = value if math.isfinite(value) else None
        _number(sink, record, name, record.step, number)
    sink.changed.add("metrics")
    cells = metrics_of_device(record.values)
    if record.rank < 0 or record.step <= 0 or not cells:
        return
    if sink.ranks.is_on_device(record.attempt, record.rank):  # else its host knows, of all steps
        step = np.array([record.step])
        sink.tiles.add(sink.run_id, record.attempt, record.rank, step, cells)
        sink.changed.add("steps")


def _event(sink: _Sink, record: schema.Event) -> None:
    fields = json.dumps(record.fields)
    sink.row(tables.event, record, name=record.name, step=record.step, fields=fields)
    sink.changed.add("events")
    if record.name != schema.OPEN_SPANS:  # what is in it becomes steps, or lines
        _line(
            sink, record, logging.INFO, "event", "rankscope", record.name, record.step,
            record.fields,
        )  # fmt: skip


def _stacks(sink: _Sink, record: schema.Stacks) -> None:
    sink.row(
        tables.stacks, record, reason=record.reason, text=record.text, command_id=record.command
    )
    sink.changed |= {"ranks", "stacks"}


def _command(sink: _Sink, record: schema.CommandAnswer) -> None:
    if store_answer(sink.connection, sink.run_id, record):
        sink.changed.add("commands")


def _loss(sink: _Sink, record: schema.Loss) -> None:
    sink.add(
        tables.loss,
        producer_id=sink.producer_id,
        rank=record.rank,
        source=record.source,
        reason=record.reason,
        host=sink.host,
        count=record.count,
        time_ns=record.time_ns,
    )
    sink.changed.add("ranks")


def _clock(sink: _Sink, record: schema.ClockOffset) -> None:
    sink.add(
        tables.clock_offset,
        host=sink.host,
        time_ns=record.time_ns,
        offset_ns=record.offset_ns,
        band_ns=record.band_ns,
    )


def _line(
    sink: _Sink,
    record: schema.Record,
    level: int,
    stream: str,
    logger: str,
    message: str,
    step: int = 0,
    fields: dict[str, str] | None = None,
) -> None:
    sink.lines.append(
        Line(
            record.time_ns, level, record.attempt, record.rank, step, sink.host, logger, stream,
            message, fields or {},
        )
    )  # fmt: skip
    sink.changed.add("logs")


_Handler: TypeAlias = Callable[[_Sink, Any], None]
_HANDLERS: dict[type[schema.Record], _Handler] = {
    schema.RunStarted: _run,
    schema.RankRegistered: _rank,
    schema.RankEnded: _rank_end,
    schema.RankState: _state,
    schema.GroupDefined: _group,
    schema.Environment: _environment,
    schema.ErrorRaised: _error,
    schema.Metrics: _metrics,
    schema.Event: _event,
    schema.Stacks: _stacks,
    schema.CommandAnswer: _command,
    schema.ClockOffset: _clock,
    schema.Loss: _loss,
}
# Tables whose row a later record replaces, and what of it.
_REPLACED: dict[sa.Table, tuple[str, ...]] = {
    tables.environment: ("time_ns", "facts"),
    tables.metric: ("time_ns", "value", "batch_id"),
    tables.loss: ("host", "count", "time_ns"),
    tables.clock_offset: ("offset_ns", "band_ns"),
}
