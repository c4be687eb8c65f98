"""Who waits for whom: a graph over what each rank last said about its groups.

A waiter is in one operation, and the operation lacks some ranks. Following that from rank to rank
ends at ranks that wait for no rank: the roots. One look at one group is not enough, because in
nested groups most of the ranks that lack are victims themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rankscope.wire.schema import RankState
from rankscope_server.diagnose.hang.positions import OpenOperation, Positions
from rankscope_server.diagnose.window import Window

# Phases in which a rank works for itself; in the others it may wait for peers.
_COMPUTE = frozenset({"data", "forward", "backward", "optimizer", "checkpoint", "evaluation"})


@dataclass(slots=True)
class WaitGraph:
    """`waits[rank]` is the operation that a rank is in; `since_ns` when it entered (its clock)."""

    waits: dict[int, OpenOperation] = field(default_factory=dict)
    since_ns: dict[int, int] = field(default_factory=dict)
    unclear: set[int] = field(default_factory=set)  # in an operation with members never heard of

    def blamed(self) -> set[int]:
        """Return the ranks that some operation lacks."""
        return {rank for operation in self.waits.values() for rank in operation.lacks}


@dataclass(frozen=True, slots=True)
class Tangle:
    """Ranks connected by waiting, the roots of it, and whether it is a cycle without a root."""

    ranks: frozenset[int]
    roots: tuple[int, ...]
    is_cycle: bool
    is_certain: bool  # each root waits for no rank that is known
    stuck: tuple[int, ...] = ()  # no roots: ranks in an operation that all have entered


def activity_ns(state: RankState) -> int:
    """Return when a rank last did something that a hook saw, on its own clock."""
    issued = (max(group.issued_ns, group.p2p_issued_ns) for group in state.groups)
    return max([state.heartbeat_ns, state.phase_since_ns, *issued])


def build(window: Window, still: Iterable[int]) -> WaitGraph:
    """Return the graph of the ranks in `still`, those that have not moved for a while."""
    positions = Positions(window)
    graph = WaitGraph()
    for rank in still:
        groups = window.states[rank].groups
        found = [
            positions.collective(rank, group) for group in groups if group.issued > group.ended
        ]
        found += [positions.exchange(rank, group) for group in groups if group.p2p_operation]
        known = [pair for pair in found if pair is not None]
        if known:
            # The earliest operation that did not end; an open send, what all others have ended
            # and no rank here waited for, or what may be over, only where nothing else is.
            on_host = not positions.runs_on_device(rank)
            operation, since = min(
                known,
                key=lambda pair: (
                    pair[0].is_weak or (on_host and _is_over(pair[0])) or _may_be_over(pair[0]),
                    pair[1],
                ),
            )
            graph.waits[rank], graph.since_ns[rank] = operation, since
        elif found:
            graph.unclear.add(rank)
    _follow_devices(positions, graph)
    return graph


def _follow_devices(positions: Positions, graph: WaitGraph) -> None:
    """Let what all have entered wait for members whose devices are still in something earlier."""
    inside: dict[object, set[int]] = {}
    for rank, operation in graph.waits.items():
        inside.setdefault(operation.key, set()).add(rank)
    for rank, operation in list(graph.waits.items()):
        if operation.lacks or operation.is_done_elsewhere or not positions.runs_on_device(rank):
            continue
        if operation.end_is_unknown:
            continue  # nothing says that its device is still in it
        elsewhere = tuple(
            member
            for member in operation.members
            if member in graph.waits and member not in inside[operation.key]
        )
        if elsewhere:
            graph.waits[rank] = dataclasses.replace(operation, lacks=elsewhere, lack="behind")


def tangles(window: Window, graph: WaitGraph) -> list[Tangle]:
    """Return the connected parts of the graph with their roots."""
    links = {rank: _lacks(graph, rank) for rank in graph.waits}
    return [_tangle(window, graph, links, part) for part in _parts(graph)]


def _lacks(graph: WaitGraph, rank: int) -> tuple[int, ...]:
    """Return whom a rank surely waits for: an open send proves nothing if its taker waits too."""
    operation = graph.waits[rank]
    if not operation.is_weak or not operation.lacks:
        return operation.lacks
    taker = graph.waits.get(operation.lacks[0])
    takes = taker is not None and not taker.is_weak and rank in taker.lacks
    return () if takes else operation.lacks


def _parts(graph: WaitGraph) -> list[frozenset[int]]:
    neighbours: dict[int, set[int]] = {}
    linked = set[int]()
    for rank, operation in graph.waits.items():
        for other in operation.lacks[:1] or operation.members[:1]:
            neighbours.setdefault(rank, set()).add(other)
            neighbours.setdefault(other, set()).add(rank)
        if id(operation) in linked:
            continue  # many ranks share one operation; its lacking ranks are linked once
        linked.add(id(operation))
        for first, second in zip(operation.lacks, operation.lacks[1:], strict=False):
            neighbours.setdefault(first, set()).add(second)
            neighbours.setdefault(second, set()).add(first)
    parts, seen = [], set[int]()
    for start in neighbours:
        if start in seen:
            continue
        part, frontier = {start}, [start]
        while frontier:
            new = neighbours[frontier.pop()] - part
            part |= new
            frontier += new
        seen |= part
        parts.append(frozenset(part))
    return parts


def _tangle(
    window: Window,
    graph: WaitGraph,
    links: Mapping[int, tuple[int, ...]],
    part: frozenset[int],
) -> Tangle:
    inside = {id(graph.waits[rank]): graph.waits[rank] for rank in part if rank in graph.waits}
    blamed = {rank for operation in inside.values() for rank in operation.lacks}
    certain = sorted(rank for rank in blamed if _waits_for_no_rank(graph, rank))
    if certain:
        return Tangle(part, tuple(certain), False, not graph.unclear.intersection(certain))
    stuck = tuple(
        sorted(
            rank
            for rank in part
            if rank in graph.waits and not graph.waits[rank].lacks and not graph.waits[rank].is_weak
        )
    )
    if stuck:  # all are there and nothing moves
        return Tangle(part, (), False, True, stuck)
    # Left are ranks whose only open operation is a send: they may be at work behind it.
    loose = [
        rank
        for rank in part
        if rank in graph.waits and graph.waits[rank].is_weak and rank in window.states
    ]
    if loose:
        return Tangle(part, (min(loose, key=lambda rank: _order(window, rank)),), False, False)
    return Tangle(part, _cycle(links, min(blamed)), True, False)


def _waits_for_no_rank(graph: WaitGraph, rank: int) -> bool:
    """Return whether a rank that others lack is in no operation, or alone in one."""
    operation = graph.waits.get(rank)
    return (
        operation is None
        or _is_over(operation)
        or _may_be_over(operation)
        or (operation.is_weak and not operation.lacks)
    )


def _is_over(operation: OpenOperation) -> bool:
    """Return whether an operation lacks no rank and another rank has ended it."""
    return not operation.lacks and operation.is_done_elsewhere


def _may_be_over(operation: OpenOperation) -> bool:
    """Return whether all have entered an operation whose end is never reported."""
    return operation.end_is_unknown and not operation.lacks


def _order(window: Window, rank: int) -> tuple[bool, int]:
    """Order candidates: those at work first, then by who stopped first."""
    state = window.states[rank]
    return state.phase not in _COMPUTE, activity_ns(state)


def _cycle(links: Mapping[int, tuple[int, ...]], start: int) -> tuple[int, ...]:
    """Follow the links from `start` until a rank comes again; return the ranks of that circle."""
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        onward = links.get(rank, ())
        if not onward:
            return (rank,)
        rank = onward[0]
    return tuple(sorted(path[path.index(rank) :]))
