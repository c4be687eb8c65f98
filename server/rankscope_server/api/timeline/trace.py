"""Steps as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process is a rank; its first thread is what the rank did, the others are its operations, as many
as are under way at a time. Arrows lead from a send to its receive, and from the rank that came
last to a collective to all others: to the part of their operations since then, a slice inside.
Each step is read, written and forgotten, so that memory does not grow with the range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import MAX_RANK, P2P_OPERATIONS
from rankscope_server.api.timeline.calls import Matched, match
from rankscope_server.api.timeline.path import critical_path
from rankscope_server.api.timeline.queries import sizes_of, span_of
from rankscope_server.api.timeline.reading import Recorded, read_step
from rankscope_server.api.timeline.slices import lane_of, own_parts

MAX_STEPS = 100
_STEP_THREAD, _PATH_PROCESS = 0, -1
_PATH_PID, _MAX_THREADS = MAX_RANK + 1, 1_000
_encode = msgspec.json.Encoder().encode
_Event = dict[str, Any]


@dataclass(slots=True)
class _Trace:
    """What holds over the steps of one trace."""

    origin_ns: int = 0
    flows: int = 0
    named: set[tuple[int, int]] = field(default_factory=set)  # processes and their threads
    until_ns: dict[tuple[int, int], int] = field(default_factory=dict)  # by process and thread

    def us(self, ns: int) -> float:
        """Return a time of the trace."""
        return _us(ns - self.origin_ns)

    def flow(self) -> int:
        """Return the number of a new arrow."""
        self.flows += 1
        return self.flows


def trace_parts(
    engine: sa.Engine, run: sa.Row[Any], first: int, last: int, ranks: Sequence[int]
) -> Iterator[bytes]:
    """Yield the JSON of some steps, of some ranks or of all."""
    trace = _Trace()
    comma = b""
    for step in range(first, last + 1):
        with engine.connect() as connection:  # none is held while a slow reader takes its time
            recorded = read_step(connection, run, step)
        origin, _ = span_of(recorded)
        if step == first:
            trace.origin_ns = origin
            yield _head(run, first, last, recorded)
        events = _events(trace, recorded, ranks) if origin else []
        if events:
            yield comma + b",\n".join(map(_encode, events))
            comma = b",\n"
    yield b"\n]}\n"


def _head(run: sa.Row[Any], first: int, last: int, recorded: Recorded) -> bytes:
    origin, length = span_of(recorded)
    about = {
        "run": run.run_id, "steps": f"{first}-{last}", "began_ms": origin / 1e6,
        "clocks": recorded.clocks.text(length / 1e6, recorded.hosts)[0],
    }  # fmt: skip
    return b'{"displayTimeUnit":"ms","otherData":' + _encode(about) + b',"traceEvents":[\n'


def _events(trace: _Trace, recorded: Recorded, ranks: Sequence[int]) -> list[_Event]:
    matched = match(recorded.calls, recorded.clocks.shift_ns, sizes_of(recorded))
    parts = own_parts(recorded)
    chosen = ranks or range(recorded.height)
    found: list[_Event] = []
    threads: dict[int, int] = {}  # of each call that is drawn
    for rank in chosen:
        lane = lane_of(recorded, matched, parts, rank)
        found += _names(trace, recorded, rank, _STEP_THREAD)
        for one in lane.slices:
            args: dict[str, Any] = {"step": recorded.step}
            if one.microbatch >= 0:
                args["microbatch"] = one.microbatch
            if one.call >= 0:
                args |= _about(matched, one.call)
            found.append(
                _slice(trace, rank, _STEP_THREAD, one.kind, one.begin_ns, one.end_ns, args)
            )
        found += _operations(trace, recorded, matched, rank, threads)
    found += _arrows(trace, matched, threads)
    found += _path(trace, recorded, matched)
    return found


def _operations(
    trace: _Trace, recorded: Recorded, matched: Matched, rank: int, threads: dict[int, int]
) -> list[_Event]:
    """Return the operations of a rank; those that overlap are on threads of their own."""
    calls, ended = matched.calls, matched.ended_ns
    found: list[_Event] = []
    free: list[int] = []  # when each thread is free again
    for call in range(*np.searchsorted(calls.rank, (rank, rank + 1)).tolist()):
        begin, end = int(matched.arrived_ns[call]), int(ended[call])
        thread = next((n for n, until in enumerate(free) if until <= begin), len(free))
        free[thread : thread + 1] = [end]
        threads[call] = thread + 1
        found += _names(trace, recorded, rank, thread + 1)
        word = calls.operations[calls.operation[call]]
        found.append(_slice(trace, rank, thread + 1, word, begin, end, _about(matched, call)))
    return found


def _about(matched: Matched, call: int) -> dict[str, Any]:
    calls, operation = matched.calls, int(matched.of[call])
    about: dict[str, Any] = {
        "operation": calls.operations[calls.operation[call]],
        "group": calls.groups[calls.group[call]], "sequence": int(calls["sequence"][call]),
        "size_bytes": int(calls["size_bytes"][call]), "step": int(calls["step"][call]),
        "blocked_us": int(calls.waited_ns[call]) / 1e3,
    }  # fmt: skip
    if calls["peer_rank"][call] >= 0:
        about["peer_rank"] = int(calls["peer_rank"][call])
    if matched.last_rank[operation] >= 0:
        about["last_to_arrive"] = int(matched.last_rank[operation])
        about["late_us"] = int(matched.late_ns[operation]) / 1e3
    return about


def _arrows(trace: _Trace, matched: Matched, threads: dict[int, int]) -> list[_Event]:
    """Return arrows from each send to its receive, and from the last to come to the others."""
    calls = matched.calls
    found: list[_Event] = []
    is_p2p = calls.is_one_of(P2P_OPERATIONS)
    is_send = calls.is_one_of(frozenset({"send"}))
    for operation in range(len(matched.first)):
        members = [one for one in matched.calls_of(operation).tolist() if one in threads]
        if len(members) < 2:
            continue
        if is_p2p[members[0]]:
            sources = [one for one in members if is_send[one]]
            name = "send to receive"
        else:
            last = int(matched.last_rank[operation])
            sources = [one for one in members if calls.rank[one] == last]
            name = "came last"
        for source in sources[:1]:
            found += [
                event
                for target in members
                if target != source
                for event in _arrow(trace, matched, threads, name, source, target)
            ]
    return found


def _arrow(
    trace: _Trace, matched: Matched, threads: dict[int, int], name: str, source: int, target: int
) -> list[_Event]:
    """Return an arrow to the part of an operation that began when the other one was there.

    Perfetto leads arrows from the slice that began earlier to the one that began later: of an
    operation that waited, only this part began after what it waited for.
    """
    calls, ended = matched.calls, matched.ended_ns
    number = trace.flow()
    begin, limit = int(matched.arrived_ns[source]), int(ended[target])
    end = min(max(begin + 1, int(matched.arrived_ns[target])), limit)
    found: list[_Event] = []
    if int(matched.arrived_ns[target]) < end < limit:
        where = _thread(int(calls.rank[target]), threads[target])
        part = _complete(trace, "transfer", "transfer", end, limit, where)
        found.append({**part, "args": _about(matched, target)})
    ends: tuple[tuple[str, int, int, dict[str, str]], ...] = (
        ("s", source, begin, {}),
        ("f", target, end, {"bp": "e"}),
    )
    return found + [
        {
            "name": name, "cat": "wait", "ph": phase, "id": number, "ts": trace.us(at),
            **_thread(int(calls.rank[call]), threads[call]), **more,
        }
        for phase, call, at, more in ends
    ]  # fmt: skip


def _path(trace: _Trace, recorded: Recorded, matched: Matched) -> list[_Event]:
    found = _names(trace, recorded, _PATH_PROCESS, _STEP_THREAD)
    for one in critical_path(recorded, matched).stretches:
        name = f"rank {one.rank}"
        args: dict[str, Any] = {"step": recorded.step, "is_sure": one.is_sure}
        if one.call >= 0:
            args |= _about(matched, one.call)
            name = f"{args['operation']}, last was rank {one.rank}"
        found.append(
            _slice(trace, _PATH_PROCESS, _STEP_THREAD, name, one.begin_ns, one.end_ns, args)
        )
    return found


def _slice(
    trace: _Trace, process: int, thread: int, name: str, begin_ns: int, end_ns: int,
    args: dict[str, Any],
) -> _Event:  # fmt: skip
    # Steps end by a float, and begin by a clock: those of a thread must not overlap by a rounding.
    begin_ns = max(begin_ns, trace.until_ns.get((process, thread), begin_ns))
    trace.until_ns[process, thread] = max(begin_ns, end_ns)
    category = "step" if thread == _STEP_THREAD else "operation"
    where = _thread(process, thread)
    return {**_complete(trace, name, category, begin_ns, end_ns, where), "args": args}


def _complete(
    trace: _Trace, name: str, category: str, begin_ns: int, end_ns: int, where: dict[str, int]
) -> _Event:
    return {
        "name": name, "cat": category, "ph": "X", "ts": trace.us(begin_ns),
        "dur": _us(max(end_ns - begin_ns, 0)), **where,
    }  # fmt: skip


def _names(trace: _Trace, recorded: Recorded, process: int, thread: int) -> list[_Event]:
    """Return the names of a process and its thread, once in a trace."""
    found = []
    if (process, -1) not in trace.named:
        trace.named.add((process, -1))
        name = "critical path"
        if process >= 0:
            place = recorded.places[process]
            stage = f", stage {place.stage}" if place.stage >= 0 else ""
            name = f"rank {process} on {place.host or 'an unknown host'}{stage}"
        found.append(_named(process, "process_name", name=name))
        found.append(_named(process, "process_sort_index", sort_index=process))
    if (process, thread) not in trace.named:
        trace.named.add((process, thread))
        name = "step" if thread == _STEP_THREAD else f"operations {thread}"
        found.append(_named(process, "thread_name", thread, name=name))
    return found


def _named(process: int, what: str, thread: int = _STEP_THREAD, **args: Any) -> _Event:
    return {"name": what, "ph": "M", **_thread(process, thread), "args": args}


def _thread(process: int, thread: int) -> dict[str, int]:
    """Return the numbers of a thread: viewers take 0 for no process, and the main one's for it."""
    pid = process + 1 if process >= 0 else _PATH_PID
    return {"pid": pid, "tid": pid if thread == _STEP_THREAD else pid * _MAX_THREADS + thread}


def _us(ns: int) -> float:
    """Return microseconds, of which a reader that cuts off gets the same nanoseconds again."""
    return round(ns / 1e3 + 1e-4, 4)
