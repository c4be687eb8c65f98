"""Who did what when: ranks up to a hang or a crash, stopped processes, errors of GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import RankState
from rankscope_server.answers import json_object
from rankscope_server.api.hang.stored import window_of
from rankscope_server.api.machines.samples import Reader, missed
from rankscope_server.api.pictures.schema import FindingLanes, PictureLane, PictureSpan, SpanState
from rankscope_server.api.pictures.subject import AROUND_NS, Subject, evenly, others_text
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows
from rankscope_server.api.steps.queries import load_range
from rankscope_server.diagnose.hang.positions import Positions
from rankscope_server.diagnose.stalls.stopped_process import STOPPED_BY
from rankscope_server.findings.text import cut, seconds_text
from rankscope_server.ingest.step_metrics import STARTED
from rankscope_server.observe.machine_table import EVENTS
from rankscope_server.store import tables
from rankscope_server.text import exit_text, plural

_MOST_NAMED, _MOST_OTHERS = 6, 6
_LEAST_MS, _MOST_MS = 1e3, 30e3  # before the first rank stopped
_AFTER = 0.03  # of what is shown
_BURST_NS = 600 * 10**9  # in which errors of a GPU count as one
_LAST_STEPS = 8
_MOST_EVENTS = 500


def ends(connection: sa.Connection, subject: Subject) -> list[FindingLanes]:
    """Draw when each rank ended its last step, where it was then, and when it ended."""
    rows = {
        row.rank: row for row in rank_rows(connection, subject.run_id, subject.attempt, RANK_HEAD)
    }
    window = window_of(connection, subject.run, subject.attempt, subject.last_ns)
    positions = Positions(window)
    named = [rank for rank in subject.ranks if rank in rows][:_MOST_NAMED]
    rest = [rank for rank in rows if rank not in set(subject.ranks)]
    others = evenly(rest, _MOST_OTHERS if named else _MOST_NAMED + _MOST_OTHERS)
    shown = [*named, *others]
    stepped = _last_steps(connection, subject, shown)
    errors = _errors(connection, subject, shown)
    spans = {
        rank: _spans(
            rows[rank], window.states.get(rank), positions, stepped.get(rank), errors.get(rank)
        )
        for rank in shown
    }
    known = [one for rank in shown for one in spans[rank]]
    if not known:
        return []
    # Until the last step ended all is alike: from then on it matters.
    newest = max(one.end_ms for one in known)
    turns = [stepped[rank][1] / 1e6 for rank in shown if rank in stepped]
    onset = [subject.onset_ns / 1e6] if subject.onset_ns is not None else []
    turn = min([*turns, *onset], default=known[0].begin_ms)
    begin_ms = max(turn - min(max(newest - turn, _LEAST_MS), _MOST_MS),
                   min(one.begin_ms for one in known))  # fmt: skip
    end_ms = newest + _AFTER * (newest - begin_ms)
    return [
        FindingLanes(
            key="ends", title="When each rank stopped, and where", begin_ms=begin_ms,
            end_ms=end_ms, text=_ends_text(named, others, spans, stepped),
            source="steps, calls and ends as each rank saw them, by the clock of its host",
            lanes=[
                PictureLane(
                    label=f"rank {rank}", is_named=rank in subject.ranks,
                    spans=[_cut(one, begin_ms) for one in spans[rank] if one.end_ms >= begin_ms],
                )
                for rank in shown
            ],
            others=_beside(len(others), len(rest), bool(named)),
            onset=None if subject.onset_ns is None else subject.onset_ns / 1e6,
        )
    ]  # fmt: skip


def _beside(shown: int, total: int, are_some_named: bool) -> str:
    """Return of how many ranks that are not named some have a lane."""
    if not shown:
        return ""
    text = others_text(shown, total, "rank")
    return text if are_some_named else text.replace(" other", "")


def _last_steps(
    connection: sa.Connection, subject: Subject, ranks: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Return of each rank the last step that it ended, and when, ns."""
    last = int(connection.scalar(
        sa.select(sa.func.max(tables.attempt.c.step_hi)).where(
            tables.attempt.c.run_id == subject.run_id,
            tables.attempt.c.attempt == subject.attempt,
        )
    ) or 0)  # fmt: skip
    first = max(1, last - _LAST_STEPS + 1)
    planes = load_range(connection, subject.run_id, (STARTED, "step"), first, last, subject.attempt)
    started, took = planes[STARTED], planes["step"]
    found = {}
    for rank in ranks:
        if rank < min(len(started), len(took)):
            ended = np.flatnonzero((started[rank] > 0) & ~np.isnan(took[rank]))
            if len(ended):
                at = int(ended[-1])
                took_ns = int(float(took[rank, at]) * 1e6)
                found[rank] = first + at, int(started[rank, at]) + took_ns
    return found


def _errors(
    connection: sa.Connection, subject: Subject, ranks: Sequence[int]
) -> dict[int, PictureSpan]:
    """Return the first error of each rank."""
    table = tables.error_event.c
    rows = connection.execute(
        sa.select(table.rank, table.time_ns, table.type, table.message)
        .where(
            table.run_id == subject.run_id, table.attempt == subject.attempt,
            table.rank.in_(ranks),
        )
        .order_by(table.time_ns.desc())
        .limit(_MOST_EVENTS)
    )  # fmt: skip
    return {
        row.rank: _span(row.time_ns, row.time_ns, "event", cut(f"{row.type}: {row.message}", 120))
        for row in rows
    }


def _spans(
    row: Any, state: RankState | None, positions: Positions, stepped: tuple[int, int] | None,
    error: PictureSpan | None,
) -> list[PictureSpan]:  # fmt: skip
    """Return what a rank did: in steps, then in a call or elsewhere, its error, its end."""
    over = row.ended_ns or max(row.last_seen_ns or 0, state.time_ns if state else 0)
    begin = row.registered_ns or (stepped[1] if stepped else over)
    if not over:
        return []
    found, since = [], begin
    if stepped is not None:
        since = stepped[1]
        found.append(_span(begin, since, "ran", f"ended step {stepped[0]:,}"))
    if over > since:
        since_ns, kind, text = _where(state, positions, since, stepped)
        if since_ns > since:
            found.append(_span(since, since_ns, "ran", "worked after it"))
        found.append(_span(since_ns, over, kind, text))
    if error is not None:
        found.append(error)
    if row.ended_ns:
        found.append(_span(over, over, "event", _end_text(row, error)))
    return found


def _end_text(row: Any, error: PictureSpan | None) -> str:
    is_same = error is not None and row.end_reason == "exception"
    return "ended by it" if is_same else exit_text(row)


def _where(
    state: RankState | None, positions: Positions, since_ns: int, stepped: tuple[int, int] | None
) -> tuple[int, SpanState, str]:
    """Return since when a rank was where it was seen last: in a call that is open, or a phase."""
    last = stepped[0] if stepped is not None else 0
    if state is None or state.step <= last:  # it says nothing of the time since
        return since_ns, "inside", f"in step {last + 1:,}" if last else "before its first step"
    found = [
        call
        for group in state.groups
        for look in (positions.collective, positions.exchange)
        if (call := look(state.rank, group)) is not None
    ]
    calls = [(max(since_ns, at), operation) for operation, at in found if not operation.is_weak]
    if not calls:
        return since_ns, "inside", f"in {state.phase} of step {state.step:,}, in no call"
    began, operation = min(calls, key=lambda call: call[0])
    number = f" {operation.sequence:,}" if operation.sequence else ""
    return began, "waits", f"in {operation.name}{number} of {operation.group}"


def _span(begin_ns: int, end_ns: int, state: SpanState, text: str) -> PictureSpan:
    return PictureSpan(begin_ms=begin_ns / 1e6, end_ms=end_ns / 1e6, state=state, text=text)


def _cut(span: PictureSpan, begin_ms: float) -> PictureSpan:
    return msgspec.structs.replace(span, begin_ms=max(span.begin_ms, begin_ms))


def _ends_text(
    named: Sequence[int], others: Sequence[int], spans: Mapping[int, Sequence[PictureSpan]],
    stepped: Mapping[int, tuple[int, int]],
) -> str:  # fmt: skip
    """Return which step the named ranks and most of the others ended last, and what came then."""

    def last(rank: int) -> str:
        done = f"ended step {stepped[rank][0]:,} last" if rank in stepped else "ended no step"
        return ", then ".join([done, *(one.text for one in spans[rank] if one.state != "ran")])

    texts = [f"Rank {rank} {last(rank)}" for rank in named if spans[rank]]
    most = Counter(last(rank) for rank in others if spans[rank]).most_common(1)
    if most:
        words, count = most[0]
        whom = (
            f"{count} of {plural(len(others), 'other rank')}"
            if named
            else f"{count} of {plural(len(others), 'rank')}"
        )
        texts.append(f"{whom} {words}")
    began = {
        rank: min(events) for rank in (*named, *others)
        if (events := [one.begin_ms for one in spans[rank] if one.state == "event"])
    }  # fmt: skip
    if len(began) > 1 and named and named[0] in began:
        later = min(ms for rank, ms in began.items() if rank != named[0]) - began[named[0]]
        if later > 0:
            texts.append(f"rank {named[0]} was {seconds_text(later / 1e3)} before the next one")
    return "; ".join(texts)


def stops(connection: sa.Connection, subject: Subject) -> list[FindingLanes]:
    """Draw when the processes of ranks were found stopped, sample by sample."""
    named = [rank for rank in subject.ranks if rank in subject.host_of][:_MOST_NAMED]
    rest = subject.peers()
    others = evenly(rest, _MOST_OTHERS)
    hosts = sorted({subject.host_of[rank] for rank in (*named, *others)})
    begin, end = subject.between()
    end = max(end, subject.last_ns) if subject.onset_ns is not None else end
    reader = Reader(connection, subject.run_id, "process", hosts, (begin, end))
    lanes: dict[int, list[PictureSpan]] = defaultdict(list)
    for (_, key), part in reader.read(["stopped_by"]):
        rank = int(key[0])
        if rank in (*named, *others):
            lanes[rank] += _sampled(part["time_ns"], part["stopped_by"], part["interval_ns"])
    spans = [one for rank in lanes for one in lanes[rank]]
    stopped = [one for one in spans if one.state == "stopped"]
    if not stopped:
        return []
    total = {
        rank: sum(one.end_ms - one.begin_ms for one in lanes[rank] if one.state == "stopped")
        for rank in named
    }
    return [
        FindingLanes(
            key="stops", title="When processes were found stopped",
            begin_ms=min(one.begin_ms for one in spans), end_ms=max(one.end_ms for one in spans),
            text="; ".join(
                f"rank {rank} was stopped for about {ms / 1e3:.3g} s" for rank, ms in total.items()
            ).capitalize(),
            source="the kernel's state of each process, in samples; times by the host's clock",
            lanes=[
                PictureLane(label=f"rank {rank}", is_named=rank in named, spans=lanes[rank])
                for rank in (*named, *others) if rank in lanes
            ],
            others=others_text(len(others), len(rest), "rank") if others else "",
            onset=None if subject.onset_ns is None else subject.onset_ns / 1e6,
        )
    ]  # fmt: skip


def _sampled(times: Any, codes: Any, intervals: Any) -> list[PictureSpan]:
    """Return a span for each stretch of samples that say the same; none where one is missing."""
    if len(times) < 2:
        return []
    is_known = ~missed(times, intervals) & (codes[:-1] >= 0)
    found: list[PictureSpan] = []
    starts = np.flatnonzero((np.diff(codes[:-1], prepend=-2) != 0)
                            | ~np.concatenate([[False], is_known[:-1]]))  # fmt: skip
    for start, stop in zip(starts, [*starts[1:], len(times) - 1], strict=True):
        if is_known[start]:
            code = int(codes[start])
            last = start + int(np.argmin(np.append(is_known[start:stop], False)))
            state: SpanState = "stopped" if code else "ran"
            text = STOPPED_BY.get(code, "stopped") if code else "may run"
            found.append(_span(int(times[start]), int(times[last]), state, text))
    return found


def gpu_errors(connection: sa.Connection, subject: Subject) -> list[FindingLanes]:
    """Draw what the driver reported of the GPUs of the host, and when."""
    if subject.onset_ns is None:
        return []
    begin, end = subject.onset_ns - AROUND_NS, subject.onset_ns + _BURST_NS
    table = tables.event.c
    rows = connection.execute(
        sa.select(table.time_ns, table.name, table.fields)
        .where(
            table.run_id == subject.run_id, table.name.in_(EVENTS),
            table.time_ns.between(begin, end),
        )
        .order_by(table.time_ns)
        .limit(_MOST_EVENTS)
    ).all()  # fmt: skip
    lanes = _event_lanes(rows, subject)
    if not lanes:
        return []
    newest = max(one.end_ms for spans in lanes.values() for one in spans)
    first, count = next(iter(lanes.items()))
    return [
        FindingLanes(
            key="errors", title="What the driver and the kernel reported of GPUs",
            begin_ms=begin / 1e6, end_ms=max(newest, subject.onset_ns / 1e6) + AROUND_NS / 1e6,
            text=f"{first[0].upper()}{first[1:]}: {plural(len(count), 'report')}, the first "
            f"“{count[0].text}”",
            source="the driver's library and the kernel log, by the clock of the host",
            lanes=[
                PictureLane(label=label, is_named=label == first, spans=spans)
                for label, spans in lanes.items()
            ][:_MOST_NAMED],
            others="", onset=subject.onset_ns / 1e6,
        )
    ]  # fmt: skip


def _event_lanes(rows: Iterable[Any], subject: Subject) -> dict[str, list[PictureSpan]]:
    """Return the events of the named hosts by GPU, the GPU that reported at the onset first."""
    lanes: dict[str, list[PictureSpan]] = defaultdict(list)
    for time_ns, name, fields in rows:
        said = json_object(fields) or {}
        host = said.get("host", "")
        if host in subject.hosts or not subject.hosts:
            gpu = said.get("gpu", said.get("pci", "unknown"))
            words = said.get("text") or f"{name} {said.get('number', '')}".strip()
            lanes[f"GPU {gpu} of {host}"].append(_span(time_ns, time_ns, "event", words))
    onset_ms = (subject.onset_ns or 0) / 1e6
    return dict(sorted(
        lanes.items(), key=lambda item: min(abs(one.begin_ms - onset_ms) for one in item[1])
    ))  # fmt: skip
