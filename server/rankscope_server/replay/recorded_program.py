"""What ranks did in some steps, from their records, as a graph that can be replayed.

Of each operation a rank says when it entered the call, how long until the end, and how long its
main thread was blocked for it. So the points of a step are known on the rank's own clock: where an
operation was issued, where the rank began to wait for it, where the wait was over. Between points
is self time. No two clocks are compared: of a transfer, every member knows how long it took, and
the last to arrive waited least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.wire.schema import P2P_OPERATIONS
from rankscope_server.findings.statistics import Array
from rankscope_server.replay.event_graph import CycleError, GraphBuilder
from rankscope_server.replay.replay import Replay

_BLOCKED_MS = 0.01  # a wait shorter than this is the call itself
_MIN_MEMBERS_SHARE = 0.9  # of a transfer that must be known
_OVER_SHARE = 0.9  # of steps in which an operation must have ended to count as joined
_MIN_ROWS_SHARE = 0.5  # of a rank's steps that must do the same operations


class NoReplay(Exception):
    """The records cannot be replayed; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Name:
    """What an operation is to its rank, so that ranks that do the same are found."""

    group: int  # the n-th group that the rank uses in a step
    operation: int
    shift: int | None  # of an exchange: the peer's number less the rank's own
    size_bytes: int
    dtype: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What ranks that do the same did: arrays are ranks x steps x operations, ms of the step."""

    rows: Array  # of the ranks
    names: tuple[Name, ...]  # of each operation
    groups: Array  # ranks x operations: the numbers of their groups
    issued: Array
    ended: Array
    blocked: Array
    duration: Array  # ranks x steps
    nodes: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # of the replay


@dataclass(frozen=True, slots=True)
class Point:
    """Where a rank issues an operation, or waits for some."""

    is_issue: bool
    operations: tuple[int, ...]


def programs_of(
    events: Mapping[str, Array],
    operations: Sequence[str],
    ranks: Sequence[int],
    steps: Array,
    started_ms: Array,
    duration_ms: Array,
    stage: Array,
) -> list[Program]:
    """Return the programs of all ranks. `started_ms` and `duration_ms` are ranks x steps.

    Raises NoReplay.
    """
    exchanges = {n for n, name in enumerate(operations) if name in P2P_OPERATIONS}
    row_of = {rank: row for row, rank in enumerate(ranks)}
    alike: dict[Hashable, list[tuple[int, Array, Array]]] = {}
    silent = set(ranks)
    for part in np.split(
        np.arange(len(events["rank"])), np.flatnonzero(np.diff(events["rank"])) + 1
    ):
        rank = int(events["rank"][part[0]]) if len(part) else -1
        if rank not in row_of:
            continue
        silent.discard(rank)
        columns, rows = _usual(events, part, np.searchsorted(steps, events["step"][part]))
        names = _names(events, rows[0], rank, exchanges)
        key = (int(stage[row_of[rank]]), names)
        alike.setdefault(key, []).append((row_of[rank], columns, rows))
    if silent:
        raise NoReplay(f"no collectives of rank {min(silent)} are known")
    return [
        _program(events, key[1], found, started_ms, duration_ms)  # type: ignore[index]
        for key, found in alike.items()
    ]


def _names(
    events: Mapping[str, Array], rows: Array, rank: int, exchanges: set[int]
) -> tuple[Name, ...]:
    local: dict[int, int] = {}
    return tuple(
        Name(
            local.setdefault(int(events["group"][row]), len(local)),
            int(events["operation"][row]),
            int(events["peer"][row]) - rank if int(events["operation"][row]) in exchanges else None,
            int(events["size_bytes"][row]),
            int(events["dtype"][row]),
        )
        for row in rows
    )


def _usual(events: Mapping[str, Array], part: Array, column: Array) -> tuple[Array, Array]:
    """Return the columns in which a rank does what it does most often, and the rows of these."""
    begins = np.flatnonzero(np.r_[True, np.diff(column) != 0])
    counts = np.diff(np.r_[begins, len(column)])
    names = np.stack([events[name][part] for name in ("group", "operation", "peer", "size_bytes")])
    texts = [
        names[:, begin : begin + count].tobytes()
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True)
    ]
    usual, times = max(Counter(texts).items(), key=lambda item: (item[1], item[0]))
    if times < _MIN_ROWS_SHARE * len(texts):
        raise NoReplay("steps differ in their collectives")
    chosen = np.flatnonzero([text == usual for text in texts])
    rows: Array = part[begins[chosen][:, None] + np.arange(int(counts[chosen[0]]))]
    return column[begins[chosen]], rows


def _program(
    events: Mapping[str, Array],
    names: tuple[Name, ...],
    found: list[tuple[int, Array, Array]],
    started_ms: Array,
    duration_ms: Array,
) -> Program:
    shape = (len(found), started_ms.shape[1], len(names))
    issued, ended, blocked = (np.full(shape, np.nan) for _ in range(3))
    rows = np.array([row for row, _, _ in found])
    for at, (row, columns, places) in enumerate(found):
        since = events["arrived_ns"][places] * 1e-6 - started_ms[row, columns][:, None]
        took = events["duration_ms"][places]
        took = np.where(took >= 0, took, events["returned_ms"][places])
        issued[at, columns] = np.clip(since, 0.0, duration_ms[row, columns][:, None])
        ended[at, columns] = issued[at, columns] + np.where(took >= 0, took, np.nan)
        blocked[at, columns] = np.maximum(events["blocked_ms"][places], 0.0)
    return Program(
        rows=rows,
        names=names,
        groups=np.stack([events["group"][places[0]] for _, _, places in found]),
        issued=issued,
        ended=ended,
        blocked=blocked,
        duration=duration_ms[rows],
    )


def points_of(program: Program) -> list[Point]:
    """Return issues and waits in program order, the same for all ranks of a program.

    A wait is where it usually is. An operation for which no rank waits is joined with the
    next one for which a rank does, else at the end of the step, if it had ended by then.
    """
    num_operations = len(program.names)
    waits = program.blocked > _BLOCKED_MS
    begins = np.where(waits, program.ended - program.blocked, np.nan)
    slots: dict[int, list[int]] = {}
    for operation in range(num_operations):
        known = ~np.isnan(begins[..., operation])
        if not known.any():
            continue
        before = program.issued[known] <= begins[..., operation][known][:, None] + _BLOCKED_MS
        slot = int(np.median(before.sum(axis=1)))
        slots.setdefault(max(slot, operation + 1), []).append(operation)
    points: list[Point] = []
    pending: list[int] = []
    for operation in range(num_operations + 1):
        for joined in slots.get(operation, []):
            with_it = [
                earlier
                for earlier in pending
                if earlier < joined
                and not _is_waited(slots, earlier)
                and _is_over(program.ended[..., earlier], program.ended[..., joined])
            ]
            points.append(Point(False, (*with_it, joined)))
            pending = [
                earlier for earlier in pending if earlier not in with_it and earlier != joined
            ]
        if operation < num_operations:
            points.append(Point(True, (operation,)))
            pending.append(operation)
    left = [
        earlier for earlier in pending if _is_over(program.ended[..., earlier], program.duration)
    ]
    if left:
        points.append(Point(False, tuple(left)))
    return points


def _is_over(ended: Array, until: Array) -> bool:
    """Return whether an operation has mostly ended by some time; then it can be joined there."""
    known = ~np.isnan(ended) & ~np.isnan(until)
    over = ended[known] <= until[known] + _BLOCKED_MS
    return len(over) > 0 and bool(np.mean(over) >= _OVER_SHARE)


def _is_waited(slots: Mapping[int, list[int]], operation: int) -> bool:
    return any(operation in joined for joined in slots.values())


def segments_of(program: Program, points: Sequence[Point]) -> Array:
    """Return self time before each point and after the last, ranks x steps x (points + 1), ms."""
    begins, ends = [], []
    for point in points:
        last = point.operations[-1]
        if point.is_issue:
            begins.append(program.issued[..., last])
            ends.append(program.issued[..., last])
        else:
            waited = program.blocked[..., last] > _BLOCKED_MS
            ends.append(np.where(waited, program.ended[..., last], np.nan))
            begins.append(ends[-1] - program.blocked[..., last])
    later = program.duration
    for at in reversed(range(len(points))):  # a wait that took no time: as late as it can be
        unknown = np.isnan(begins[at]) & ~np.isnan(program.issued[..., 0])
        begins[at] = np.where(unknown, later, begins[at])
        ends[at] = np.where(unknown, later, ends[at])
        later = begins[at]
    now = np.zeros_like(program.duration)
    segments = []
    for begin, end in zip(begins, ends, strict=True):
        segments.append(np.maximum(begin - now, 0.0))
        now = np.fmax(now, np.fmax(begin, end))
        now = np.where(np.isnan(begin), np.nan, now)
    segments.append(np.maximum(program.duration - now, 0.0))
    return np.stack(segments, axis=-1)


def replay_of_programs(
    programs: Sequence[Program],
    *,
    ranks: Sequence[int],
    steps: Array,
    stage: Array,
    step_ms: Array,
    operations: Sequence[str],
    members: Mapping[tuple[int, int], Hashable],
) -> tuple[Replay, list[Program]]:
    """Return the steps, ready to replay, and the programs with the node of each operation.

    `members` names the group of (rank, group number). Raises NoReplay.
    """
    builder = GraphBuilder(len(ranks))
    durations: dict[int, Array] = {}
    kind_of: dict[int, str] = {}
    took: dict[Hashable, list[Array]] = {}
    with_nodes: list[Program] = []
    for number, program in enumerate(programs):
        points = points_of(program)
        segments = segments_of(program, points)
        transfers = _transfers(program)
        nodes = np.zeros(program.groups.shape, np.int64)
        what = [transfer_kind(name, operations) for name in program.names]
        in_order = _in_order(program)
        for at, row in enumerate(program.rows.tolist()):
            keys = _keys(program, at, ranks[row], operations, members)
            for index in range(len(points) + 1):
                node = builder.work(row)
                durations[node] = segments[at, :, index]
                kind_of[node] = f"work {number}.{index}"
                if index < len(points):
                    for operation in points[index].operations:
                        put = builder.issue if points[index].is_issue else builder.join
                        put(row, keys[operation])
            for operation, key in enumerate(keys):
                took.setdefault(key, []).append(transfers[at, :, operation])
                node = nodes[at, operation] = builder.transfers[key]
                kind_of[node] = what[operation]
            for earlier, later in in_order:
                builder.follow(keys[later], keys[earlier])
        with_nodes.append(replace(program, nodes=nodes))
    made = _replay(builder, durations, kind_of, took, ranks, steps, stage, step_ms)
    return made, with_nodes


def _replay(
    builder: GraphBuilder,
    durations: dict[int, Array],
    kind_of: Mapping[int, str],
    took: Mapping[Hashable, list[Array]],
    ranks: Sequence[int],
    steps: Array,
    stage: Array,
    step_ms: Array,
) -> Replay:
    try:
        graph = builder.build()
    except CycleError as error:
        raise NoReplay(str(error)) from error
    for key, node in builder.transfers.items():
        durations[node] = _shortest(np.stack(took[key]))
    recorded = np.zeros((graph.num_nodes, len(steps)))
    for node, values in durations.items():
        recorded[node] = values
    unknown = np.isnan(recorded)
    if unknown.all(axis=1).any():
        raise NoReplay("when some collectives ended is not known")
    usual = np.nanmedian(recorded, axis=1, keepdims=True)
    kinds = tuple(dict.fromkeys([*kind_of.values(), "nothing"]))
    number = {kind: place for place, kind in enumerate(kinds)}
    return Replay(
        graph=graph,
        recorded=np.where(unknown, usual, recorded),
        kind=np.array([number[kind_of.get(node, "nothing")] for node in range(graph.num_nodes)]),
        kinds=kinds,
        stage=stage,
        step_ms=step_ms,
        ranks=tuple(ranks),
        steps=steps,
        missing_share=float(unknown.mean()),
    )


def _shortest(took: Array) -> Array:
    """Return per step the shortest of the members; NaN where too few of them are known.

    If the last to arrive is among the missing, the shortest that is known holds a wait.
    """
    enough = np.mean(~np.isnan(took), axis=0) >= _MIN_MEMBERS_SHARE
    found: Array = np.fmin.reduce(took)
    return np.where(enough, found, np.nan) if enough.any() else found


def transfer_kind(name: Name, operations: Sequence[str]) -> str:
    """Return the kind of a transfer: both sides of an exchange have the same."""
    what = "exchange" if name.shift is not None else operations[name.operation]
    return f"{what} of {name.size_bytes} bytes"


def _transfers(program: Program) -> Array:
    """Return how long each operation took once the one before in its group had ended."""
    found = program.ended - program.issued
    for earlier, operation in _in_order(program):
        begin = np.fmax(program.issued[..., operation], program.ended[..., earlier])
        found[..., operation] = program.ended[..., operation] - begin
    positive: Array = np.maximum(found, 0.0)
    return positive


def _in_order(program: Program) -> list[tuple[int, int]]:
    """Return pairs of collectives of one group of which the second ended after the first."""
    previous: dict[int, int] = {}
    pairs = []
    for operation, name in enumerate(program.names):
        if name.shift is not None:
            continue
        earlier = previous.get(name.group)
        if earlier is not None:
            gap = program.ended[..., operation] - program.ended[..., earlier]
            known = gap[~np.isnan(gap)]
            if len(known) and np.quantile(known, 0.1) >= 0:
                pairs.append((earlier, operation))
        previous[name.group] = operation
    return pairs


def _keys(
    program: Program,
    at: int,
    rank: int,
    operations: Sequence[str],
    members: Mapping[tuple[int, int], Hashable],
) -> list[Hashable]:
    """Return what names each operation among all ranks: the n-th of its group, or of its pair."""
    counts: Counter[Hashable] = Counter()
    keys: list[Hashable] = []
    for name, group in zip(program.names, program.groups[at].tolist(), strict=True):
        word = operations[name.operation]
        if word == "recv_any_source":
            raise NoReplay("a receive from any source does not say for whom it waits")
        who: Hashable = ("group", members.get((rank, group), group))
        if name.shift is not None:
            peer = rank + name.shift
            who = ("pair", group, *((rank, peer) if word == "send" else (peer, rank)))
        counts[who] += 1
        keys.append((who, counts[who]))
    return keys
