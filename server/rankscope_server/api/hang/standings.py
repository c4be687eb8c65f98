"""Who waits, who is waited for, and why the latter did not come. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_server.api.hang.schema import Standing
from rankscope_server.diagnose.hang.detector import Patience
from rankscope_server.diagnose.hang.positions import OpenOperation
from rankscope_server.diagnose.hang.wait_graph import WaitGraph, build, tangles
from rankscope_server.diagnose.window import Window

_STEPS_AHEAD = 2  # one more than ranks of a synchronous job can be apart
_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Waits:
    """Who waits in what, for whom; `roots` wait for no rank, or for each other."""

    operations: Mapping[int, OpenOperation]  # of the ranks that wait
    since_ns: Mapping[int, int]  # on the clock of each
    waited_seconds: Mapping[int, float]  # up to the last record
    roots: tuple[int, ...]
    stuck: frozenset[int]  # in an operation that all have entered and that does not end
    lacking: Mapping[int, OpenOperation]  # one that lacks this rank
    lacks: Mapping[tuple[int, str], OpenOperation]  # the same by group
    held: Mapping[int, OpenOperation]  # what a rank is still in though others have ended it
    unclear: frozenset[int]
    idle_seconds: Mapping[int, float]  # of every rank that is known to have moved


def waits_of(window: Window) -> Waits:
    """Return who waits, as the detector sees it: ranks that moved lately are left out."""
    patience = Patience(window)
    still = [rank for rank in window.states if _is_still(window, patience, rank)]
    graph = build(window, still)
    found = tangles(window, graph)
    stuck = frozenset(rank for tangle in found for rank in tangle.stuck)
    blamed = graph.blamed()
    operations = {
        rank: operation for rank, operation in graph.waits.items()
        if operation.lacks or rank in stuck
    }  # fmt: skip
    lacking: dict[int, OpenOperation] = {}
    lacks: dict[tuple[int, str], OpenOperation] = {}
    for operation in _by_weight(graph):
        for rank in operation.lacks:
            lacking.setdefault(rank, operation)
            lacks.setdefault((rank, operation.group), operation)
    return Waits(
        operations=operations,
        since_ns=graph.since_ns,
        waited_seconds={
            rank: max((patience.now_ns(rank) - graph.since_ns[rank]) / _SECOND, 0.0)
            for rank in operations if graph.since_ns[rank]
        },
        roots=tuple(sorted({r for tangle in found for r in tangle.roots} & blamed)),
        stuck=stuck,
        lacking=lacking,
        lacks=lacks,
        held={
            rank: operation for rank, operation in graph.waits.items()
            if rank not in operations and operation.is_done_elsewhere
        },
        unclear=_unclear(window, graph, still),
        idle_seconds={
            rank: max(patience.idle_seconds(rank), 0.0)
            for rank in window.states if patience.has_moved(rank)
        },
    )  # fmt: skip


def _by_weight(graph: WaitGraph) -> list[OpenOperation]:
    """Return each operation once: collectives first, which say more than exchanges, by waiters."""
    waiters = Counter(id(operation) for operation in graph.waits.values())
    distinct = {id(operation): operation for operation in graph.waits.values()}
    return sorted(
        distinct.values(), key=lambda one: (not one.sequence, -waiters[id(one)], one.sequence)
    )


def _is_still(window: Window, patience: Patience, rank: int) -> bool:
    ended = window.ended.get(rank)
    return (
        patience.idle_seconds(rank) >= window.policy.hang_floor_seconds
        and not patience.is_gone(rank)
        and not patience.is_silent(rank)
        and not (ended is not None and ended.reason == "clean")
    )


def _unclear(window: Window, graph: WaitGraph, still: Sequence[int]) -> frozenset[int]:
    return frozenset(graph.unclear) | {rank for rank in still if not window.states[rank].groups}


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a finding says of ranks whose last records show it no more."""

    group: str
    standings: Mapping[int, Standing]


class Standings:
    """Where a rank stands, in a group or among all; `remembered`: as a finding says it."""

    def __init__(self, window: Window, waits: Waits, remembered: Remembered | None = None) -> None:
        self._window, self._waits = window, waits
        self._remembered = remembered
        self._patience = Patience(window)
        steps = [window.states[rank].step for rank in waits.operations if rank in window.states]
        self._waiting_step = max(steps, default=0)

    def of(self, rank: int) -> Standing:
        """Return where a rank stands among all."""
        if self._remembered is not None and rank in self._remembered.standings:
            return self._remembered.standings[rank]
        if rank in self._waits.operations:
            return "waiting"
        return self._of_lacking(rank, self._waits.lacking.get(rank))

    def in_group(self, rank: int, group: str) -> Standing:
        """Return where a rank stands as a member of a group."""
        if self._remembered is not None and group == self._remembered.group:
            return self.of(rank)
        own = self._waits.operations.get(rank)
        if own is not None and own.group == group:
            return "waiting"
        if own is not None:
            return "elsewhere"
        return self._of_lacking(rank, self._waits.lacks.get((rank, group)))

    def _of_lacking(self, rank: int, operation: OpenOperation | None) -> Standing:
        """Return how a rank is that does not wait; `operation` lacks it, or none does."""
        end, state = self._window.ended.get(rank), self._window.states.get(rank)
        is_clean = end is not None and end.reason == "clean"
        if operation is None:
            return self._quiet(rank)
        if is_clean:
            return "left"
        if self._patience.is_gone(rank):
            return "gone"
        if state is None:
            return "unknown"
        if self._patience.is_silent(rank):
            return "silent"
        if state.step >= self._waiting_step + _STEPS_AHEAD:
            return "left"
        entered = next((g.issued for g in state.groups if g.group == operation.group), 0)
        is_in = 0 < operation.sequence <= entered
        return "behind" if is_in or operation.lack == "behind" else "missing"

    def _quiet(self, rank: int) -> Standing:
        """Return how a rank is that no rank waits for and that waits for no rank."""
        end = self._window.ended.get(rank)
        if end is not None:
            return "finished" if end.reason == "clean" else "failed"
        if rank not in self._window.states:
            return "unknown"
        if self._patience.is_silent(rank):
            return "silent"
        return "unknown" if rank in self._waits.unclear else "moving"
