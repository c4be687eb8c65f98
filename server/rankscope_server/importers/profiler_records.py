"""Traces of PyTorch's profiler, one of each rank, as the steps and collectives of an agent.

Ranks are matched in the steps that all of them have; `profiler_waits` finds which rank waited.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.importers.flight_records import OPERATIONS, Imported
from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.importers.columns import chunk_of, collective_columns
from rankscope_server.importers.profiler_trace import Operation, RankTrace, Span
from rankscope_server.importers.profiler_waits import (
    UNKNOWN_GROUP,
    Placed,
    bytes_of,
    match,
    union,
    waits,
)
from rankscope_server.text import NO_GROUP_NAMES

Array = NDArray[Any]
SOURCE = "PyTorch profiler"
_ALL = "all traced ranks"  # taken for a group where they call the same in a step
_NUMBERS = re.compile(r"\d+")
_EVENTS_PER_CHUNK = 5_000  # as collectors send them
_NAMES = (("sendrecv", "send"), ("send", "send"), ("recv", "recv"))


@dataclass(slots=True)
class _Rank:
    trace: RankTrace
    steps: dict[int, Span]
    placed: list[Placed] = field(default_factory=list)


def import_traces(traces: Mapping[int, RankTrace]) -> Imported:
    """Return the records of a run of which these ranks were traced. Raises ValueError."""
    steps = set.intersection(*({number for number, _ in one.steps} for one in traces.values()))
    if not steps:
        raise ValueError(
            "the traces have no step in common; profile the same steps on all ranks, and call "
            "step() of the profiler or of an optimizer"
        )
    groups = _groups(traces)
    shift = int(0 in steps)  # a profile without a schedule begins at 0, the tables at 1
    ranks = {
        rank: _Rank(trace, {n + shift: span for n, span in trace.steps if n in steps})
        for rank, trace in sorted(traces.items())
    }
    for rank_trace in ranks.values():
        _place(rank_trace, groups[rank_trace.trace.rank])
    match({rank: rank_trace.placed for rank, rank_trace in ranks.items()})
    sizes = [int(one.info.get("world_size") or 0) for one in traces.values()]
    members = [rank for named in groups.values() for ranks_ in named.values() for rank in ranks_]
    world_size = max([*sizes, max(traces) + 1, *(m + 1 for m in members)])
    found = Imported(min(world_size, schema.MAX_RANK))
    for rank, rank_trace in ranks.items():
        _add_rank(found, rank, rank_trace, groups[rank])
    return found


# --- groups ---------------------------------------------------------------------------------


def _groups(traces: Mapping[int, RankTrace]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return for each rank its groups and their members, empty where a trace cuts the list."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for rank, trace in traces.items():
        mine = found[rank] = {}
        configs = trace.info.get("pg_config")
        for config in configs if isinstance(configs, list) else []:
            if isinstance(config, dict):
                mine[_label(config.get("pg_name"), config.get("pg_desc"))] = _members(
                    config.get("ranks"), config.get("pg_size"), trace
                )
        for operation in trace.operations:
            args = operation.args
            if "Process Group Name" in args:
                name = _label(args["Process Group Name"], args.get("Process Group Description"))
                if not mine.get(name):
                    mine[name] = _members(
                        args.get("Process Group Ranks"), args.get("Group size"), trace
                    )
    if len(traces) > 1 and not any(found.values()):  # before PyTorch 2.2 no trace names groups
        return {rank: {_ALL: tuple(sorted(traces))} for rank in traces}
    return found


def _label(name: Any, description: Any) -> str:
    text = "" if description in (None, *NO_GROUP_NAMES) else f"{description} "
    return f"{text}{name}"[:256]


def _members(ranks: Any, size: Any, trace: RankTrace) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in _NUMBERS.findall(str(ranks)) if len(number) < 8)
    world = trace.info.get("world_size")
    if isinstance(size, int) and len(numbers) != size:  # long lists are cut in a trace
        return tuple(range(size)) if size == world and size < schema.MAX_RANK else ()
    return numbers if all(number < schema.MAX_RANK for number in numbers) else ()


def _group_of(operation: Operation, groups: Mapping[str, tuple[int, ...]]) -> str:
    args = operation.args
    if "Process Group Name" in args:
        return _label(args["Process Group Name"], args.get("Process Group Description"))
    return next(iter(groups)) if len(groups) == 1 else UNKNOWN_GROUP  # gloo does not say which


# --- operations -----------------------------------------------------------------------------


def _place(one: _Rank, groups: Mapping[str, tuple[int, ...]]) -> None:
    """Put each operation into its step, in order of time."""
    order = sorted(one.steps.items(), key=lambda item: item[1].start_us)
    starts = [span.start_us for _, span in order]
    optimizers = sorted(span.start_us for span in one.trace.optimizer)
    for operation in sorted(one.trace.operations, key=lambda item: item.start_us):
        at = bisect.bisect_right(starts, operation.start_us) - 1
        if at < 0:
            continue
        # the last step's work on the device may end a little after its mark
        limit = starts[at + 1] if at + 1 < len(order) else math.inf
        if operation.start_us >= limit or operation.start_us > order[at][1].end_us + _slack(order):
            continue
        group = _group_of(operation, groups)
        kind, open_us = _kind(operation.name), _open_us(operation, optimizers)
        one.placed.append(Placed(operation, group, kind, order[at][0], open_us))


def _open_us(operation: Operation, optimizers: Sequence[float]) -> float:
    """Return how long an operation can have held up its rank.

    gloo notes the end from a thread of its own, on a busy host long after the rank went on: the
    gradients are there when the optimizer begins.
    """
    if operation.is_device:
        return operation.duration_us
    at = bisect.bisect_right(optimizers, operation.start_us)
    until = optimizers[at] if at < len(optimizers) else math.inf
    return min(operation.duration_us, until - operation.start_us)


def _slack(order: Sequence[tuple[int, Span]]) -> float:
    return max(span.end_us - span.start_us for _, span in order) / 2


def _kind(name: str) -> str:
    text = name.lower().removeprefix("nccl:").lstrip("_")
    for theirs, ours in (*_NAMES[:1], *OPERATIONS):
        if theirs.replace("_", "") in text.replace("_", ""):
            return ours
    return "other"


# --- steps ----------------------------------------------------------------------------------


def _inside(spans: Sequence[Span], step: Span) -> list[Span]:
    return [span for span in spans if step.start_us <= span.start_us < step.end_us]


def _phases(trace: RankTrace, step: Span) -> dict[str, Span | float]:
    """Return data in us, and when forward, backward and optimizer ran."""
    data = _inside(trace.data, step)
    optimizer = _inside(trace.optimizer, step)
    backward = _inside(trace.backward, step)
    forward = _inside(trace.forward, step)
    found: dict[str, Span | float] = {"data": sum(span.end_us - span.start_us for span in data)}
    if optimizer:
        found["optimizer"] = Span(optimizer[0].start_us, max(span.end_us for span in optimizer))
    if backward:
        begin = min(span.start_us for span in backward)
        end = max(span.end_us for span in backward)
        if optimizer and optimizer[0].start_us > begin:
            end = optimizer[0].start_us  # the wait for the last bucket is between
        found["backward"] = Span(begin, max(begin, end))
        loaded = max((span.end_us for span in data if span.end_us <= begin), default=step.start_us)
        first = forward[0].start_us if forward and forward[0].start_us < begin else loaded
        found["forward"] = Span(first, begin)
    elif forward:
        found["forward"] = Span(forward[0].start_us, forward[-1].end_us)
    return found


def _step_columns(one: _Rank) -> dict[str, Column]:
    trace, numbers = one.trace, sorted(one.steps)
    work = union(trace.kernels if len(trace.kernels) else trace.host_work)
    columns = {name: np.zeros(len(numbers), np.int64) for name in schema.STEP_COLUMNS}
    by_step: dict[int, list[Placed]] = defaultdict(list)
    for placed in one.placed:
        by_step[placed.step].append(placed)
    for row, number in enumerate(numbers):
        step = one.steps[number]
        columns["step"][row] = number
        columns["started_ns"][row] = trace.base_ns + int(step.start_us * 1e3)
        duration = int((step.end_us - step.start_us) * 1e3)
        columns["duration_ns"][row] = duration
        columns["num_collectives"][row] = len(by_step[number])
        columns["microbatches"][row] = 1
        spans = _phases(trace, step)
        left = duration
        for name in ("data", "forward", "backward", "optimizer"):
            span = spans.get(name, 0.0)
            took = span if isinstance(span, float | int) else span.end_us - span.start_us
            columns[f"{name}_ns"][row] = min(left, max(0, int(took * 1e3)))
            left -= int(columns[f"{name}_ns"][row])
        columns["other_ns"][row] = left
        for begin, end in waits(by_step[number], work):
            _block(columns, row, _phase_at(end, spans), int((end - begin) * 1e3))
    return dict(columns)


def _phase_at(end: float, spans: Mapping[str, Span | float]) -> str:
    for name in ("forward", "backward", "optimizer"):
        span = spans.get(name)
        if isinstance(span, Span) and span.start_us <= end <= span.end_us:
            return name
    return "backward" if isinstance(spans.get("backward"), Span) else "other"


def _block(columns: Mapping[str, Array], row: int, phase: str, blocked_ns: int) -> None:
    """Add blocked time to a phase, and what does not fit into it to the rest."""
    for name in dict.fromkeys((phase, "other", "backward", "optimizer", "forward")):
        room = int(columns[f"{name}_ns"][row] - columns[f"{name}_blocked_ns"][row])
        taken = min(room, blocked_ns)
        columns[f"{name}_blocked_ns"][row] += taken
        blocked_ns -= taken


# --- records --------------------------------------------------------------------------------


def _add_rank(
    found: Imported, rank: int, one: _Rank, groups: Mapping[str, tuple[int, ...]]
) -> None:
    trace = one.trace
    host = str(trace.head.get("host_name") or "")[:200]
    began = min(span.start_us for span in one.steps.values())
    who: dict[str, Any] = {
        "attempt": 0, "rank": rank, "time_ns": max(0, trace.base_ns + int(began * 1e3)),
    }  # fmt: skip
    backend = str(trace.info.get("backend") or "")[:64]
    found.records.append(
        schema.RankRegistered(
            **who, world_size=found.world_size, local_rank=0, local_world_size=1, node_rank=-1,
            host=host, pid=0, backend=backend, sources={"collectives": SOURCE, "steps": SOURCE},
        )
    )  # fmt: skip
    found.records += [
        schema.GroupDefined(**who, group=name, ranks=list(ranks), backend=backend)
        for name, ranks in groups.items()
        if ranks
    ]
    facts = {"nccl.version": str(trace.info.get("nccl_version") or "")}
    for at, device in enumerate(trace.head.get("deviceProperties") or []):
        if isinstance(device, dict) and at == 0:
            facts["gpu.model"] = str(device.get("name") or "")[:200]
    if facts := {name: value for name, value in facts.items() if value}:
        found.records.append(schema.Environment(**who, facts=facts))
    if trace.loads_itself:
        loader = {"num_workers": "0"}
        found.records.append(schema.Event(**who, name=schema.DATA_LOADER, fields=loader))
    found.chunks.append(chunk_of("steps", rank, _step_columns(one), host))
    for begin in range(0, len(one.placed), _EVENTS_PER_CHUNK):
        columns = _event_columns(one.placed[begin : begin + _EVENTS_PER_CHUNK], trace.base_ns)
        found.chunks.append(chunk_of("collectives", rank, columns, host))


def _event_columns(placed: Sequence[Placed], base: int) -> dict[str, Column]:
    count = len(placed)
    sizes = [bytes_of(item.operation.args) for item in placed]
    durations = np.array([int(item.operation.duration_us * 1e3) for item in placed])
    columns = collective_columns(count)
    is_p2p = [item.kind in schema.P2P_OPERATIONS for item in placed]
    columns |= {
        "arrived_ns": np.array([base + int(item.operation.start_us * 1e3) for item in placed]),
        "duration_ns": durations,
        "device_duration_ns": np.where([i.operation.is_device for i in placed], durations, -1),
        "blocked_ns": np.zeros(count, np.int64),
        "sequence": np.array([item.sequence for item in placed]),
        "step": np.array([item.step for item in placed]),
        "size_bytes": np.array([max(size[:2]) for size in sizes]),
        "input_bytes": np.array([size[0] for size in sizes]),
        "output_bytes": np.array([size[1] for size in sizes]),
        "num_tensors": np.ones(count, np.int64),
        "state": np.full(count, schema.ENDED),
        "flags": np.where(is_p2p, schema.FLAG_P2P, schema.FLAG_ASYNC),
        "group": [item.group for item in placed],
        "operation": [item.kind for item in placed],
        "dtype": [size[2] for size in sizes],
    }
    return columns
