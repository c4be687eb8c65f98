"""Horovod's timeline: what its rank 0 saw of the collectives of all ranks, as those of an agent.

An array of events of Chrome's viewer (horovod/common/timeline.cc): a tensor is a process. For each
reduction a span NEGOTIATE_ALLREDUCE with a tick of each rank that is ready, then a span ALLREDUCE
with its activities inside; its end has dtype and shape. Times are microseconds since the start,
which newer versions give in wall clock. Where the response cache answers, there is no tick.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.importers.flight_records import Imported
from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope.wire.formulas import item_bytes
from rankscope_server.importers.columns import chunk_of, collective_columns
from rankscope_server.importers.counted import Counted
from rankscope_server.importers.json_events import READ_CHARACTERS, TraceError, events_of

SOURCE = "Horovod timeline"
GROUP = "horovod"  # all ranks; process sets are not named in a timeline
TIMELINE = re.compile(
    rb'^\s*\[.*("start_time_since_epoch_in_micros"|"NEGOTIATE_[A-Z]+")', re.DOTALL
)
_KINDS = {
    "ALLREDUCE": "all_reduce", "ADASUM": "all_reduce", "ALLGATHER": "all_gather",
    "BROADCAST": "broadcast", "ALLTOALL": "all_to_all", "REDUCESCATTER": "reduce_scatter",
    "BARRIER": "barrier",
}  # fmt: skip
_NEGOTIATE, _START = "NEGOTIATE_", "start_time_since_epoch_in_micros"
_NUMBERS = re.compile(r"\d+")
_EVENTS_PER_CHUNK = 5_000  # as collectors send them


@dataclass(slots=True)
class Operation:
    """One collective of one tensor. Times are microseconds of the timeline."""

    tensor: str
    number: int  # how many there were of this tensor and kind with it
    kind: str
    began_us: float
    ready_us: dict[int, float] = field(default_factory=dict)  # by rank, as rank 0 heard of it
    ended_us: float | None = None
    dtype: str = ""
    size_bytes: int = -1
    depth: int = 0  # of spans that are open
    is_negotiated: bool = False


@dataclass(slots=True)
class Timeline:
    """One file, operations in the order in which they began."""

    operations: list[Operation]
    base_ns: int  # to add to its times for wall clock
    last_us: float

    @property
    def num_ranks(self) -> int:
        """Return how many ranks there are, as far as any was ever seen ready."""
        return 1 + max((rank for one in self.operations for rank in one.ready_us), default=-1)


def read_timeline(path: Path, on_bytes: Callable[[int], None] = lambda size: None) -> Timeline:
    """Read one file; a job that was killed leaves it cut. Raises TraceError."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            text = io.TextIOWrapper(
                io.BufferedReader(Counted(file, on_bytes), 1 << 20), errors="replace"
            )
            buffer = text.read(READ_CHARACTERS)
            for event in events_of(text, buffer, buffer.find("[") + 1, may_be_cut=True):
                reader.take(event)
        modified_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    found = reader.timeline(modified_ns)
    if not found.num_ranks:
        raise TraceError(
            f"{path}: no rank is seen to become ready in it; record it from the start of the job"
        )
    if found.num_ranks > schema.MAX_RANK:
        raise TraceError(f"{path}: has a rank beyond {schema.MAX_RANK:,}; is it a timeline?")
    return found


class _Reader:
    """Puts the events of each tensor together."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._open: dict[int, Operation] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._operations: list[Operation] = []
        self._base_us: int | None = None
        self._last_us = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event; what has another shape is left out."""
        phase, pid, name = event.get("ph"), event.get("pid"), str(event.get("name", ""))
        raw = event.get("args")
        args = raw if isinstance(raw, dict) else {}
        if phase == "M":
            self._describe(pid, name, args)
            return
        at_us = event.get("ts")
        if not isinstance(at_us, int | float) or not 0 <= at_us < 1e15:
            return
        self._last_us = max(self._last_us, at_us)  # also of marks of cycles: rank 0 still runs
        if not isinstance(pid, int):
            return
        if phase == "B":
            self._begin(pid, name, at_us)
        elif phase == "X":
            self._tick(pid, name, at_us)
        elif phase == "E":
            self._end(pid, at_us, args)

    def timeline(self, modified_ns: int) -> Timeline:
        """Return what was read; without a start in wall clock the file's last write is its end."""
        base_ns = modified_ns - int(self._last_us * 1e3)
        if self._base_us is not None:
            base_ns = self._base_us * 1000
        order = sorted(self._operations, key=lambda one: one.began_us)
        return Timeline(order, max(0, base_ns), self._last_us)

    def _describe(self, pid: Any, name: str, args: Mapping[str, Any]) -> None:
        if name != "process_name" or not isinstance(pid, int):
            return
        start = args.get(_START)
        if isinstance(start, int) and 0 < start < 1 << 52:
            self._base_us = start
        elif "name" in args:
            self._names[pid] = str(args["name"])[:256]

    def _begin(self, pid: int, name: str, at_us: float) -> None:
        one = self._open.get(pid)
        if one is not None and one.depth == 0 and name.startswith(_NEGOTIATE):
            one.ended_us = at_us  # it was never done, as a rank that joins
            one = None
        if one is None:
            one = self._opened(pid, name, at_us)
        one.depth += 1

    def _opened(self, pid: int, name: str, at_us: float) -> Operation:
        kind = _KINDS.get(name.removeprefix(_NEGOTIATE), "other")
        tensor = self._names.get(pid, str(pid))
        self._counts[tensor, kind] += 1
        one = Operation(tensor, self._counts[tensor, kind], kind, at_us)
        one.is_negotiated = name.startswith(_NEGOTIATE)
        self._open[pid] = one
        self._operations.append(one)
        return one

    def _tick(self, pid: int, name: str, at_us: float) -> None:
        one = self._open.get(pid)
        if one is not None and name.isdecimal() and len(name) < 9:
            one.ready_us.setdefault(int(name), at_us)

    def _end(self, pid: int, at_us: float, args: Mapping[str, Any]) -> None:
        one = self._open.get(pid)
        if one is None:
            return
        one.depth = max(0, one.depth - 1)
        if one.depth:
            return
        if one.is_negotiated:
            one.is_negotiated = False  # what was negotiated comes next
            return
        one.ended_us = at_us
        del self._open[pid]
        one.dtype = str(args.get("dtype", ""))[:32]
        if "shape" in args:
            shape = [int(number) for number in _NUMBERS.findall(str(args["shape"]))[:16]]
            size = math.prod(shape) * item_bytes(one.dtype)
            one.size_bytes = size if size < 1 << 61 else -1


def import_timeline(timeline: Timeline) -> Imported:
    """Return the records of the run: collectives of each rank, steps, and where each one stands."""
    num_ranks = timeline.num_ranks
    found = Imported(num_ranks, num_open=sum(one.ended_us is None for one in timeline.operations))
    steps = list(_steps(timeline))
    for rank in range(num_ranks):
        _add_rank(found, timeline, rank, steps)
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """From the end of the last reduction to that of the next ones."""

    number: int
    began_us: float
    ended_us: float
    ready_us: Sequence[float]  # when each rank was ready for its last one
    num_collectives: int


def _steps(timeline: Timeline) -> Iterator[_Step]:
    """Yield the steps of which every rank is known: those of tensors that come in every step."""
    counts = Counter(one.tensor for one in timeline.operations if one.kind == "all_reduce")
    most = max(counts.values(), default=0)
    by_number: dict[int, list[Operation]] = {}
    for one in timeline.operations:
        if one.kind == "all_reduce" and counts[one.tensor] >= max(2, most - 1):
            by_number.setdefault(one.number, []).append(one)
    before: float | None = None
    for number, operations in sorted(by_number.items()):
        ends = [one.ended_us for one in operations if one.ended_us is not None]
        if len(ends) < len(operations):
            return
        ended = max(ends)
        is_whole = all(len(one.ready_us) == timeline.num_ranks for one in operations)
        if before is not None and before < ended and is_whole:
            ready = [
                max(one.ready_us[rank] for one in operations) for rank in range(timeline.num_ranks)
            ]
            yield _Step(number, before, ended, ready, len(operations))
        before = ended


def _add_rank(found: Imported, timeline: Timeline, rank: int, steps: Sequence[_Step]) -> None:
    base = timeline.base_ns
    known = [
        (sequence, one)
        for sequence, one in enumerate(timeline.operations, 1)
        if rank in one.ready_us
    ]
    who: dict[str, Any] = {"attempt": 0, "rank": rank}
    began = known[0][1].ready_us[rank] if known else 0.0
    found.records += [
        schema.RankRegistered(
            **who, time_ns=base + int(began * 1e3), world_size=found.world_size, local_rank=0,
            local_world_size=1, node_rank=-1, host="", pid=0, backend=GROUP,
            sources={"collectives": SOURCE, "steps": SOURCE},
        ),
        schema.GroupDefined(
            **who, time_ns=base + int(began * 1e3), group=GROUP,
            ranks=list(range(found.world_size)), backend=GROUP,
        ),
    ]  # fmt: skip
    now = base + int(timeline.last_us * 1e3)
    last = max((one.ready_us[rank] for _, one in known), default=0.0)
    found.records.append(
        schema.RankState(
            **who, time_ns=now, step=0, phase="other", phase_since_ns=base + int(last * 1e3),
            heartbeat_ns=base + int(last * 1e3), groups=[_standing(timeline, rank)],
        )
    )  # fmt: skip
    if steps:
        found.chunks.append(chunk_of("steps", rank, _step_columns(steps, rank, base)))
    for begin in range(0, len(known), _EVENTS_PER_CHUNK):
        columns = _event_columns(known[begin : begin + _EVENTS_PER_CHUNK], rank, base)
        found.chunks.append(chunk_of("collectives", rank, columns))


def _standing(timeline: Timeline, rank: int) -> schema.GroupState:
    """Return how far a rank is: before the first operation that is open and lacks it."""
    whole = len(timeline.operations)
    waiting = [(at, one) for at, one in enumerate(timeline.operations, 1) if one.ended_us is None]
    lacking = [at for at, one in waiting if rank not in one.ready_us]
    issued = lacking[0] - 1 if lacking else whole
    mine = [(at, one) for at, one in waiting if at <= issued]
    fields: dict[str, Any] = {}
    if mine:
        (first, one), (_, last) = mine[0], mine[-1]
        fields = {
            "open_sequence": first, "open_operation": one.kind, "open_bytes": one.size_bytes,
            "open_ns": timeline.base_ns + int(one.ready_us[rank] * 1e3),
            "operation": last.kind, "size_bytes": last.size_bytes, "call_site": last.tensor,
            "issued_ns": timeline.base_ns + int(last.ready_us[rank] * 1e3),
        }  # fmt: skip
    ended = (mine[0][0] if mine else issued + 1) - 1
    return schema.GroupState(group=GROUP, issued=issued, ended=ended, ends_are_known=True, **fields)


def _step_columns(steps: Sequence[_Step], rank: int, base: int) -> dict[str, Column]:
    """Return the steps of a rank: until it was ready for the last reduction it worked."""
    columns: dict[str, Column] = {
        name: np.zeros(len(steps), np.int64) for name in schema.STEP_COLUMNS
    }
    duration = np.array([int((step.ended_us - step.began_us) * 1e3) for step in steps])
    waited = np.array([int((step.ended_us - step.ready_us[rank]) * 1e3) for step in steps])
    columns |= {
        "step": np.array([step.number for step in steps]),
        "started_ns": np.array([base + int(step.began_us * 1e3) for step in steps]),
        "duration_ns": duration, "other_ns": duration,
        "other_blocked_ns": np.clip(waited, 0, duration),
        "num_collectives": np.array([step.num_collectives for step in steps]),
        "microbatches": np.ones(len(steps), np.int64),
    }  # fmt: skip
    return columns


def _event_columns(
    known: Sequence[tuple[int, Operation]], rank: int, base: int
) -> dict[str, Column]:
    arrived = np.array([base + int(one.ready_us[rank] * 1e3) for _, one in known])
    ended = np.array(
        [-1 if one.ended_us is None else base + int(one.ended_us * 1e3) for _, one in known]
    )
    sizes = np.array([one.size_bytes for _, one in known])
    return collective_columns(len(known)) | {
        "arrived_ns": arrived,
        "duration_ns": np.where(ended < 0, -1, np.maximum(ended - arrived, 0)),
        "blocked_ns": np.zeros(len(known), np.int64),
        "sequence": np.array([sequence for sequence, _ in known]),
        "step": np.array([one.number * (one.kind == "all_reduce") for _, one in known]),
        "size_bytes": sizes, "input_bytes": sizes, "output_bytes": sizes,
        "num_tensors": np.ones(len(known), np.int64),
        "state": np.where(ended < 0, schema.ISSUED, schema.ENDED),
        "flags": np.full(len(known), schema.FLAG_ASYNC),
        "group": [GROUP] * len(known),
        "operation": [one.kind for _, one in known],
        "dtype": [one.dtype for _, one in known],
        "call_site": [one.tensor for _, one in known],
    }  # fmt: skip
