"""Spans as steps, collectives, errors and lines of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rankscope.wire import schema
from rankscope.wire.redaction import clean
from rankscope_server.importers.columns import chunk_of
from rankscope_server.otlp.attributes import (
    STEP,
    WORLD_SIZE,
    Origin,
    bare,
    number_of,
    rank_of,
    text_of,
    values_of,
    whole,
)
from rankscope_server.otlp.book import Book
from rankscope_server.otlp.names import Named, named, operation_of
from rankscope_server.otlp.numbers import numbers_of
from rankscope_server.otlp.parts import NO_RANK, Part, Resource, is_time, items, started
from rankscope_server.otlp.steps import (
    Held,
    Kept,
    Step,
    call_columns,
    calls_of,
    close,
    close_by_updates,
    is_p2p,
    left_over,
    step_columns,
    to_event,
)

WORLD = "world"  # the group of a collective that names none
NO_CALLS = "skipped: no span is a collective or a wait"
_BAD_TIME = "that end before they begin, or at no time"
_LATE = "that came after their step, kept as lines"
_OPEN = "of no step, or of one whose end has not come, kept as lines"
_MARKS = "that mark the begin or the end of another span, not kept"
_FOREIGN = "of ranks that an agent records, kept as lines"
_GROUP = ("group", "group_name", "process_group", "process_group.name", "pg_name", "comm_group")
_MEMBERS = ("group_ranks", "ranks", "process_group.ranks")
_SIZE = ("size_bytes", "message_size_bytes", "message_size", "nbytes", "bytes", "num_bytes")
_SEQUENCE = ("sequence", "sequence_number", "seq", "seq_id", "collective_seq_id")
_PEER = ("peer_rank", "peer", "dst_rank", "dst", "src_rank", "src")
_OPERATION = ("collective.operation", "collective", "operation", "op")
_ROWS = 5_000  # of a chunk, as collectors send them
_ERROR = 2  # status code
_MOST_GROUPS = 256  # of a rank


@dataclass(frozen=True, slots=True)
class _Span:
    origin: Origin
    scope: str
    span: Any
    values: dict[str, Any]
    rank: int

    @property
    def begin_ns(self) -> int:
        return int(self.span.start_time_unix_nano)

    @property
    def end_ns(self) -> int:
        return int(self.span.end_time_unix_nano)


@dataclass(slots=True)
class _Rank:
    """One rank in one request."""

    part: Part
    origin: Origin
    rank: int
    kept: Kept
    steps: list[Step] = field(default_factory=list)
    errors: set[tuple[str, str]] = field(default_factory=set)
    end: schema.RankEnded | None = None

    @property
    def who(self) -> dict[str, Any]:
        return {"attempt": self.origin.attempt, "rank": self.rank}


def take_spans(resources: Sequence[Resource], part: Part, book: Book) -> None:
    """Add what spans are to a part."""
    spans = _spans(resources, part, book)
    by_rank: dict[tuple[int, int], list[_Span]] = {}
    for one in spans:
        by_rank.setdefault((one.origin.attempt, one.rank), []).append(one)
    for (attempt, rank), mine in by_rank.items():
        mine.sort(key=lambda one: (one.end_ns, -one.begin_ns))  # a part before its whole
        if rank < 0:
            part.said.notes[NO_RANK] += len(mine)
            for one in mine:
                _take_events(part, one, named(one.span.name), None)
                _line(part, one)
            continue
        _take(_Rank(part, mine[0].origin, rank, part.of(book, attempt, rank)), mine)


def _spans(resources: Sequence[Resource], part: Part, book: Book) -> list[_Span]:
    """Return spans with their ranks, also of those that another span of their process names."""
    found: list[tuple[Origin, str, Any, dict[str, Any]]] = []
    of_traces: dict[bytes, set[int]] = {}
    for resource in resources:
        origin = resource.origin
        for scope, span in items(resource, "spans"):
            begin_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
            if not (is_time(begin_ns) and is_time(end_ns) and begin_ns <= end_ns):
                part.said.refused[_BAD_TIME] += 1
                continue
            values = values_of(span.attributes)
            rank = rank_of(values)
            if rank >= 0:
                book.is_rank(part.run_id, origin.instance, rank)
                of_traces.setdefault(span.trace_id, set()).add(rank)
            found.append((origin, scope, span, values))

    def rank_of_span(origin: Origin, span: Any, values: dict[str, Any]) -> int:
        for rank in (rank_of(values), origin.rank, book.rank_of(part.run_id, origin.instance)):
            if rank >= 0:
                return rank
        of_trace = of_traces.get(span.trace_id, set())
        return next(iter(of_trace)) if len(of_trace) == 1 else -1

    return [
        _Span(origin, scope, span, values, rank_of_span(origin, span, values))
        for origin, scope, span, values in found
    ]


def _take(mine: _Rank, spans: Sequence[_Span]) -> None:
    """Take the spans of one rank, in the order of their ends."""
    kept, part = mine.kept, mine.part
    names = [_named(one) for one in spans]
    if any(name.kind == "step" for name in names):
        kept.has_steps, kept.by_updates = True, False
    for one, name in zip(spans, names, strict=True):
        size = number_of(one.values, WORLD_SIZE)
        kept.world_size = size if size > 0 else kept.world_size or one.origin.world_size
        _take_events(part, one, name, mine.errors)
        _place(mine, one, name)
        if name.kind == "run" and not one.span.parent_span_id:
            _end(mine, one)
    if kept.is_foreign:  # its agent says how it ends
        return
    mine.steps += close_by_updates(kept)
    for held in left_over(kept):
        part.said.notes[_OPEN] += 1
        what = f"span {held.what or held.kind}: {(held.end_ns - held.begin_ns) / 1e6:,.3f} ms"
        part.line(mine.origin, mine.rank, held.begin_ns, logging.DEBUG, what, schema.SPANS, {})
    _write(mine, max(one.end_ns for one in spans))


def _place(mine: _Rank, one: _Span, name: Named) -> None:
    """Make of a span what it is: a step, a part of one, or a line."""
    kept, notes = mine.kept, mine.part.said.notes
    if name.kind == "mark":
        notes[_MARKS] += 1
        return
    if name.kind not in ("", "run"):
        if kept.is_foreign:
            notes[_FOREIGN] += 1
        elif name.kind == "step":
            said = number_of(one.values, STEP)
            step = close(kept, one.begin_ns, one.end_ns, said if said >= 0 else name.number)
            if step is not None:  # else it is around a step
                mine.steps.append(step)
                _measure(mine, one, step.number)
                return
        elif one.end_ns > kept.ended_ns:
            _hold(mine, one, name)
            return
        else:
            notes[_LATE] += 1
    _line(mine.part, one)


def _named(one: _Span) -> Named:
    """Return what a span is; an attribute may name its operation."""
    found = named(one.span.name)
    if found.kind:
        return found
    for name, value in one.values.items():
        if bare(name) in _OPERATION and isinstance(value, str):
            operation = named(value).what if named(value).kind == "call" else ""
            if operation := operation or operation_of(value.lower()):
                return Named("call", operation)
    return found


def _hold(mine: _Rank, one: _Span, name: Named) -> None:
    kept, values, step = mine.kept, one.values, number_of(one.values, STEP)
    held = Held(one.begin_ns, one.end_ns, name.kind, name.what, step)
    if name.kind == "call":
        group = next((text_of(values[key]) for key in values if bare(key) in _GROUP), WORLD)[:256]
        size = number_of(values, _SIZE)
        dtype = text_of(values.get("dtype", "")).removeprefix("torch.")[:64]
        held = Held(
            one.begin_ns, one.end_ns, "call", name.what, step, group,
            max(0, number_of(values, _SEQUENCE)), size, dtype, number_of(values, _PEER),
        )  # fmt: skip
        _define(mine, group, values, one.begin_ns, is_exchange=is_p2p(held))
    kept.held.append(held)
    if name.what == "checkpoint":
        fields = {
            "seconds": f"{(one.end_ns - one.begin_ns) / 1e9:.6f}", "how": one.span.name[:256],
        }  # fmt: skip
        mine.part.records.append(
            schema.Event(
                **mine.who, time_ns=one.begin_ns, name="checkpoint",
                step=kept.step if step < 0 else step, fields=fields,
            )
        )  # fmt: skip


def _define(
    mine: _Rank, group: str, values: Mapping[str, Any], time_ns: int, *, is_exchange: bool
) -> None:
    """Say once who the members of a group are, where a span says it."""
    kept = mine.kept
    if group in kept.groups or len(kept.groups) >= _MOST_GROUPS:
        return
    said = next((values[key] for key in values if bare(key) in _MEMBERS), None)
    ranks = [whole(one) for one in said] if isinstance(said, list) else []
    size = number_of(values, ("group_size", "process_group.size"))
    is_of_all = size == kept.world_size or (group == WORLD and size < 0 and not is_exchange)
    if not ranks and kept.world_size and is_of_all:
        ranks = list(range(kept.world_size))
    if ranks and all(0 <= rank < schema.MAX_RANK for rank in ranks):
        kept.groups.append(group)
        mine.part.records.append(
            schema.GroupDefined(
                **mine.who, time_ns=time_ns, group=group, ranks=ranks, backend=mine.origin.backend
            )
        )


def _measure(mine: _Rank, one: _Span, step: int) -> None:
    """Take the numbers that a step has as attributes."""
    if values := numbers_of(one.values):
        mine.part.records.append(
            schema.Metrics(**mine.who, time_ns=one.end_ns, step=step, values=values)
        )


def _take_events(part: Part, one: _Span, name: Named, errors: set[tuple[str, str]] | None) -> None:
    """Take what happened in a span: exceptions are errors of the rank, once, all else is lines."""
    step = number_of(one.values, STEP)
    for event in one.span.events:
        values, time_ns = values_of(event.attributes), int(event.time_unix_nano) or one.end_ns
        if event.name != "exception" or errors is None:
            if named(event.name).kind != "mark":
                text = text_of(values.get("exception.message", ""))
                message = f"{event.name}: {text}" if text else event.name
                part.line(
                    one.origin, one.rank, time_ns, logging.INFO, message, one.scope, values, step
                )
            continue
        kind = text_of(values.get("exception.type", "Exception"))
        message = clean(text_of(values.get("exception.message", "")))
        if (kind, message) in errors:  # it passes through many spans
            continue
        errors.add((kind, message))
        part.records.append(
            schema.ErrorRaised(
                attempt=one.origin.attempt, rank=one.rank, time_ns=time_ns, type=kind[:256],
                message=message, traceback=clean(text_of(values.get("exception.stacktrace", ""))),
                where="main" if name.kind == "run" else "training", step=max(0, step),
            )
        )  # fmt: skip


def _end(mine: _Rank, one: _Span) -> None:
    """Take the end of a rank: that of a span of the whole run without a parent."""
    failed = one.span.status.code == _ERROR
    mine.end = schema.RankEnded(
        **mine.who, time_ns=one.end_ns, reason="exception" if failed else "clean",
        detail=clean(one.span.status.message),
    )  # fmt: skip


def _line(part: Part, one: _Span) -> None:
    """Keep a span as a line, with its attributes and ids."""
    span = one.span
    failed = span.status.code == _ERROR
    why = f": {span.status.message}" if failed and span.status.message else ""
    ids = {
        "span_id": span.span_id.hex(), "parent_span_id": span.parent_span_id.hex(),
        "trace_id": span.trace_id.hex(),
    }  # fmt: skip
    part.line(
        one.origin, one.rank, one.begin_ns, logging.ERROR if failed else logging.DEBUG,
        f"span {span.name}: {(one.end_ns - one.begin_ns) / 1e6:,.3f} ms{why}", one.scope,
        one.values | {name: id for name, id in ids.items() if id}, number_of(one.values, STEP),
    )  # fmt: skip


def _write(mine: _Rank, newest_ns: int) -> None:
    """Write what became of the spans of a rank, and what of them is held."""
    part, kept, origin = mine.part, mine.kept, mine.origin
    is_known = kept.is_registered == 1 + kept.has_calls and kept.pid == origin.pid
    if mine.steps and not is_known:
        began_ns = mine.steps[0].begin_ns
        collectives = schema.SPANS if kept.has_calls else NO_CALLS
        part.records.insert(0, _registered(mine, began_ns, collectives))
        part.records.insert(0, started(origin, began_ns))
        kept.is_registered, kept.pid = 1 + kept.has_calls, origin.pid
    for at in range(0, len(mine.steps), _ROWS):
        columns = step_columns(mine.steps[at : at + _ROWS])
        part.chunks.append(chunk_of("steps", mine.rank, columns, part.host, origin.attempt))
    calls = calls_of(mine.steps)
    for at in range(0, len(calls), _ROWS):
        columns = call_columns(calls[at : at + _ROWS])
        part.chunks.append(chunk_of("collectives", mine.rank, columns, part.host, origin.attempt))
    part.records.append(to_event(kept, origin.attempt, mine.rank, newest_ns))
    if mine.end is not None:  # after what says in which step it was
        part.records.append(msgspec.structs.replace(mine.end, last_step=kept.step))


def _registered(mine: _Rank, time_ns: int, collectives: str) -> schema.RankRegistered:
    origin = mine.origin
    return schema.RankRegistered(
        **mine.who, time_ns=time_ns,
        world_size=max(mine.kept.world_size, mine.rank + 1), local_rank=origin.local_rank,
        local_world_size=origin.local_world_size, node_rank=origin.node_rank, host=mine.part.host,
        pid=origin.pid, backend=origin.backend,
        sources={"collectives": collectives, "steps": schema.SPANS},
    )  # fmt: skip
