"""Who waits for whom: a graph over what each rank last said about its groups (D2 1-5).

A waiter is in one operation, and the operation lacks some ranks. Following that from rank to rank
ends at ranks that wait for nobody: the roots. One look at one group is not enough, because in
nested groups most of the ranks that lack are victims themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rankscope.schema import GroupState, RankState
from rankscope_server.detectors.window import Window

Lack: TypeAlias = Literal["not entered", "behind", "sends nothing", "takes nothing"]
_UNKNOWN_END_AFTER = 256  # operations without one known end: the backend tells none
# Phases in which a rank works for itself; in the others it may wait for peers.
_COMPUTE = frozenset({"data", "forward", "backward", "optimizer", "checkpoint", "evaluation"})


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that one or more ranks are in, and the ranks that it lacks."""

    group: str
    members: tuple[int, ...]
    name: str
    sequence: int  # 0: point to point
    size_bytes: int
    lacks: tuple[int, ...]
    lack: Lack
    # A send that was issued and not waited for stays open while its rank goes on: weak evidence.
    is_weak: bool = False


@dataclass(slots=True)
class WaitGraph:
    """`waits[rank]` is the operation that a rank is in; `since_ns` when it entered (its clock)."""

    waits: dict[int, Operation] = field(default_factory=dict)
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
    is_certain: bool  # each root waits for nobody that is known


def activity_ns(state: RankState) -> int:
    """Return when a rank last did something that a hook saw, on its own clock."""
    issued = (max(group.issued_ns, group.p2p_issued_ns) for group in state.groups)
    return max([state.heartbeat_ns, state.phase_since_ns, *issued])


def build(window: Window, still: Iterable[int]) -> WaitGraph:
    """Return the graph of the ranks in `still`, those that have not moved for a while."""
    places = _Places(window)
    graph = WaitGraph()
    for rank in still:
        state = window.states[rank]
        found = [
            *(_collective(places, rank, group) for group in state.groups),
            *(_exchange(window, rank, group) for group in state.groups),
        ]
        known = [pair for pair in found if pair is not None]
        if any(group.issued > group.ended or group.p2p_operation for group in state.groups):
            graph.unclear.add(rank)
        if known:
            graph.unclear.discard(rank)
            # The earliest operation that did not end; an open send only where nothing else is.
            operation, since = min(known, key=lambda pair: (pair[0].is_weak, pair[1]))
            graph.waits[rank], graph.since_ns[rank] = operation, since
    return graph


class _Places:
    """Where the members of each group stand; each operation is worked out once."""

    def __init__(self, window: Window) -> None:
        self._groups = window.groups
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._standing: dict[tuple[int, str], GroupState] = {
            (rank, group.group): group
            for rank, state in window.states.items()
            for group in state.groups
        }
        self._heard = set(window.states) | set(window.ended)
        self._known: dict[tuple[str, tuple[int, ...], int, int], Operation | None] = {}

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """Return the ranks of a group as this rank defined it; empty where nobody did."""
        own = self._groups.get((rank, group))
        if own is not None:
            return own
        if not self._by_name:
            self._by_name = {name: ranks for (_, name), ranks in self._groups.items()}
        ranks = self._by_name.get(group, ())
        return ranks if rank in ranks else ()

    def operation(self, rank: int, group: GroupState, sequence: int) -> Operation | None:
        """Return the collective `sequence` of a group; None before all members were heard."""
        members = self.members(rank, group.group)
        key = (group.group, members, sequence, group.ended)
        if key not in self._known:
            self._known[key] = self._work_out(group, members, sequence)
        return self._known[key]

    def _work_out(
        self, group: GroupState, members: tuple[int, ...], sequence: int
    ) -> Operation | None:
        if len(members) < 2 or not self._heard.issuperset(members):
            return None
        standing = {member: self._standing.get((member, group.group)) for member in members}
        absent = tuple(
            member for member, place in standing.items() if place is None or place.issued < sequence
        )
        behind = tuple(
            member
            for member, place in standing.items()
            if place is not None and place.ended < group.ended
        )
        return Operation(
            group=group.group,
            members=members,
            name=group.operation,
            sequence=sequence,
            size_bytes=group.size_bytes,
            lacks=absent or behind,
            lack="not entered" if absent or not behind else "behind",
        )


def _collective(places: _Places, rank: int, group: GroupState) -> tuple[Operation, int] | None:
    if group.issued <= group.ended:
        return None
    tells_ends = group.ended > 0 or group.issued <= _UNKNOWN_END_AFTER
    operation = places.operation(rank, group, group.ended + 1 if tells_ends else group.issued)
    return None if operation is None else (operation, group.issued_ns)


def _exchange(window: Window, rank: int, group: GroupState) -> tuple[Operation, int] | None:
    peer = group.p2p_peer
    if not group.p2p_operation or peer < 0:
        return None
    if peer not in window.states and peer not in window.ended:
        return None
    is_send = group.p2p_operation == "send"
    operation = Operation(
        group=group.group,
        members=(rank, peer),
        name=group.p2p_operation,
        sequence=0,
        size_bytes=0,
        lacks=(peer,),
        lack="takes nothing" if is_send else "sends nothing",
        is_weak=is_send,
    )
    return operation, group.p2p_issued_ns


def tangles(window: Window, graph: WaitGraph) -> list[Tangle]:
    """Return the connected parts of the graph with their roots."""
    links = {rank: _lacks(graph, rank) for rank in graph.waits}
    return [_tangle(window, graph, links, part) for part in _parts(graph)]


def _lacks(graph: WaitGraph, rank: int) -> tuple[int, ...]:
    """Return whom a rank surely waits for: an open send proves nothing if its taker waits too."""
    operation = graph.waits[rank]
    if not operation.is_weak:
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
    blamed = {
        rank for waiter in part if waiter in graph.waits for rank in graph.waits[waiter].lacks
    }
    certain = sorted(
        rank for rank in blamed if rank not in graph.waits or not graph.waits[rank].lacks
    )
    if certain:
        return Tangle(part, tuple(certain), False, not graph.unclear.intersection(certain))
    # Left are ranks whose only open operation is a send: they may be at work behind it.
    loose = [
        rank
        for rank in part
        if rank in graph.waits and graph.waits[rank].is_weak and rank in window.states
    ]
    if loose:
        return Tangle(part, (min(loose, key=lambda rank: _order(window, rank)),), False, False)
    if not blamed:
        return Tangle(part, (), False, True)  # all are there and nothing moves
    return Tangle(part, _cycle(links, min(blamed)), True, False)


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
