"""Spans of one rank, put together to steps.

A span is sent when it ends, so what a step is made of comes before the step itself, often in an
earlier request. It is held until then, in memory and in an event of the rank (`to_event`): a
server that starts again continues with it.

A step ends with its span; where a rank has no spans of steps, with each update of the optimizer.
It begins with its span, or with what was done since the step before: between two steps scripts ask
for the next batch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.importers.columns import collective_columns
from rankscope_server.otlp.names import Kind

MAX_HELD = 2_000  # spans of a rank without a step; the oldest of more become lines
_UPDATES = 4  # of the optimizer, without a span of a step: there is none
_PART = 4_000  # characters of a field
_BLOCKED = ("forward", "backward", "optimizer", "other")
_UNKNOWN = (
    "cpu_ns", "process_cpu_ns", "gc_ns", "copy_ns", "minor_faults", "major_faults",
    "voluntary_switches", "involuntary_switches",
)  # fmt: skip


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A span that is a part of a step."""

    begin_ns: int
    end_ns: int
    kind: Kind
    what: str  # phase or operation
    step: int = -1  # as the program says it, -1 where it does not
    group: str = ""
    sequence: int = 0
    size_bytes: int = -1
    dtype: str = ""
    peer: int = -1


class Kept(msgspec.Struct):
    """What is known of a rank between two requests."""

    step: int = 0  # the newest that ended
    ended_ns: int = 0  # when it did
    shift: int = 0  # 1 where the program counts from 0
    has_steps: bool = False  # as spans
    by_updates: bool = False  # a step ends with the optimizer
    has_calls: bool = False
    world_size: int = 0
    pid: int = 0
    is_registered: int = 0  # 1: as without collectives, 2: with them
    is_foreign: bool = False  # an agent records this rank's steps
    groups: list[str] = []
    held: list[Held] = []

    def copy(self) -> Kept:
        """Return a copy that can be changed."""
        return msgspec.structs.replace(self, groups=[*self.groups], held=[*self.held])

    def number(self, said: int) -> int:
        """Return the number of the step that a program gives this one."""
        if said == 0:
            self.shift = 1
        return said + self.shift if said >= 0 else self.step + 1


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ended."""

    number: int
    begin_ns: int
    end_ns: int
    parts: Sequence[Held]
    flags: int


def close(kept: Kept, begin_ns: int, end_ns: int, said: int) -> Step | None:
    """Return the step with what is held of it; None where it is inside of one that ended."""
    if end_ns <= max(begin_ns, kept.ended_ns) or begin_ns < kept.ended_ns:
        return None
    number = kept.number(said)
    if number < 1:
        return None
    since = kept.ended_ns or begin_ns
    parts = [
        one for one in kept.held
        if since <= one.begin_ns and one.end_ns <= end_ns
        and (one.step < 0 or said < 0 or one.step <= said)
    ]  # fmt: skip
    chosen = set(map(id, parts))
    kept.held = [one for one in kept.held if id(one) not in chosen]
    flags = 0 if kept.ended_ns else schema.STEP_FIRST
    begin_ns = min([begin_ns, *(one.begin_ns for one in parts)])
    phases = {one.what for one in parts if one.kind == "phase"}
    flags |= schema.STEP_CHECKPOINT if "checkpoint" in phases else 0
    flags |= schema.STEP_EVALUATION if "evaluation" in phases else 0
    kept.has_calls |= any(one.kind in ("call", "wait") for one in parts)
    if not kept.has_calls:  # its waits are in its phases, and no span says where
        flags |= schema.STEP_THINNED | schema.STEP_WAITS_UNKNOWN
    kept.step, kept.ended_ns = number, end_ns
    return Step(number, begin_ns, end_ns, parts, flags)


def close_by_updates(kept: Kept) -> list[Step]:
    """Return the steps that ended with the optimizer, where no span of a step ever came."""
    ends = sorted(one.end_ns for one in kept.held if one.kind == "update")
    if kept.has_steps or not (kept.by_updates or len(ends) >= _UPDATES):
        return []
    kept.by_updates = True
    found = []
    for end_ns in ends:
        inside = [
            one for one in kept.held if kept.ended_ns <= one.begin_ns and one.end_ns <= end_ns
        ]
        if not inside:
            continue
        begin_ns = kept.ended_ns or min(one.begin_ns for one in inside)
        step = close(kept, begin_ns, end_ns, max(one.step for one in inside))
        if step is not None:
            found.append(step)
    return found


def left_over(kept: Kept) -> list[Held]:
    """Take out what is held and has no step any more."""
    late = [one for one in kept.held if one.end_ns <= kept.ended_ns]
    kept.held = [one for one in kept.held if one.end_ns > kept.ended_ns]
    kept.held.sort(key=lambda one: one.begin_ns)
    many = max(0, len(kept.held) - MAX_HELD)
    late += kept.held[:many]
    del kept.held[:many]
    return late


# --- durable ----------------------------------------------------------------------------------


def to_event(kept: Kept, attempt: int, rank: int, time_ns: int) -> schema.Event:
    """Return an event that holds it until the next one of this rank."""
    text = msgspec.json.encode(kept).decode()
    fields = {str(at): text[at : at + _PART] for at in range(0, len(text), _PART)}
    return schema.Event(
        attempt=attempt, rank=rank, time_ns=time_ns, name=schema.OPEN_SPANS, step=kept.step,
        fields=fields,
    )  # fmt: skip


def of_event(fields: str) -> Kept:
    """Return what an event holds; nothing where it cannot be read."""
    parts: dict[str, str] = json.loads(fields)
    try:
        text = "".join(parts[at] for at in sorted(parts, key=int))
        return msgspec.json.decode(text, type=Kept)
    except (ValueError, msgspec.MsgspecError):
        return Kept()


# --- columns ----------------------------------------------------------------------------------


def step_columns(steps: Sequence[Step]) -> dict[str, Column]:
    """Return the columns of a chunk of steps."""
    columns = {name: np.zeros(len(steps), np.int64) for name in schema.STEP_COLUMNS}
    columns |= {name: np.full(len(steps), -1, np.int64) for name in _UNKNOWN}
    for row, step in enumerate(steps):
        values = {
            "step": step.number, "started_ns": step.begin_ns, "flags": step.flags,
            "duration_ns": step.end_ns - step.begin_ns, "microbatches": 1,
            "num_collectives": sum(one.kind == "call" for one in step.parts), **shares(step),
        }  # fmt: skip
        for name, value in values.items():
            columns[name][row] = value
    return dict(columns)


def shares(step: Step) -> dict[str, int]:
    """Return how long each phase took and was blocked: of phases that overlap the innermost."""
    found: dict[str, int] = {}
    phases = [one for one in step.parts if one.kind in ("phase", "update")]
    calls = [one for one in step.parts if one.kind in ("call", "wait")]
    edges = {step.begin_ns, step.end_ns}
    edges |= {at for one in step.parts for at in (one.begin_ns, one.end_ns)}
    order = sorted(edge for edge in edges if step.begin_ns <= edge <= step.end_ns)
    active: list[Held] = []
    waiting: list[Held] = []
    phases.sort(key=lambda one: (one.begin_ns, -one.end_ns), reverse=True)
    calls.sort(key=lambda one: one.begin_ns, reverse=True)
    for begin, end in itertools.pairwise(order):
        _advance(active, phases, begin)
        _advance(waiting, calls, begin)
        name = active[-1].what if active else "other"
        if waiting and name == "data":  # it has no column for waits
            name = "other"
        names = [f"{name}_ns"] + [f"{name}_blocked_ns"] * (bool(waiting) and name in _BLOCKED)
        for column in names:
            found[column] = found.get(column, 0) + end - begin
    return found


def _advance(active: list[Held], coming: list[Held], at_ns: int) -> None:
    """Let those begin that do, and end that did; the one that began last is the last."""
    active[:] = [one for one in active if one.end_ns > at_ns]
    while coming and coming[-1].begin_ns <= at_ns:
        one = coming.pop()
        if one.end_ns > at_ns:
            active.append(one)


def call_columns(calls: Sequence[tuple[int, Held]]) -> dict[str, Column]:
    """Return the columns of a chunk of collectives, each with its step."""
    durations = np.array([one.end_ns - one.begin_ns for _, one in calls])
    sizes = np.array([one.size_bytes for _, one in calls])
    return collective_columns(len(calls)) | {
        "arrived_ns": np.array([one.begin_ns for _, one in calls]),
        "duration_ns": durations,
        "blocked_ns": durations,  # the thread that made the span was in it
        "sequence": np.array([one.sequence for _, one in calls]),
        "step": np.array([step for step, _ in calls]),
        "size_bytes": sizes, "input_bytes": sizes, "output_bytes": sizes,
        "peer_rank": np.array([one.peer for _, one in calls]),
        "num_tensors": np.ones(len(calls), np.int64),
        "state": np.full(len(calls), schema.ENDED),
        "flags": np.array([schema.FLAG_P2P * is_p2p(one) for _, one in calls]),
        "group": [one.group for _, one in calls],
        "operation": [one.what for _, one in calls],
        "dtype": [one.dtype for _, one in calls],
    }  # fmt: skip


def is_p2p(one: Held) -> bool:
    """Return whether a call is a send or a receive."""
    return one.what in schema.P2P_OPERATIONS


def calls_of(steps: Iterable[Step]) -> list[tuple[int, Held]]:
    """Return the collectives of steps, each with its number."""
    return [(step.number, one) for step in steps for one in step.parts if one.kind == "call"]
