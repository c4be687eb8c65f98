"""The wait-for graph with equal ranks folded: 1,023 ranks that wait for one are one node. Pure.

Ranks are equal where they wait in the same operation of groups of one kind, for equal ranks. Those
that others wait for stay apart while they are few.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from rankscope_server.answers import capped
from rankscope_server.api.hang import words
from rankscope_server.api.hang.ranges import rank_set
from rankscope_server.api.hang.schema import WaitEdge, WaitGraphAnswer, WaitNode
from rankscope_server.api.hang.standings import Standings, Waits
from rankscope_server.api.hang.stored import StoredWindow
from rankscope_server.diagnose.hang.positions import OpenOperation

MAX_NODES = 40
MAX_ROOTS_APART = 16
_MAX_ROUNDS = 64
_TRANSFER = -1  # stands for no rank: an operation that all have entered and that does not end
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Fold:
    label_of: Mapping[int, int]
    members: Mapping[int, list[int]]
    targets: Mapping[int, set[int]]


def fold(
    window: StoredWindow, waits: Waits, standings: Standings, say: words.Say
) -> WaitGraphAnswer:
    """Return the graph of who waits for whom, the ranks that keep all others first."""
    found = _fold(window, waits, standings)
    depth = _depths(window, waits, found)
    order = sorted(
        found.members,
        key=lambda label: (
            depth.get(label, len(depth)),
            -len(found.members[label]),
            found.members[label][0],
        ),
    )
    shown = {label: place for place, label in enumerate(order[:MAX_NODES])}
    nodes = [
        _node(window, waits, standings, say, place, depth.get(label, 0), found.members[label])
        for label, place in shown.items()
    ]
    edges = [
        WaitEdge(
            source=shown[label], target=shown[target],
            text=say.edge(nodes[shown[label]], nodes[shown[target]]),
        )
        for label in shown for target in sorted(found.targets.get(label, ())) if target in shown
    ]  # fmt: skip
    return WaitGraphAnswer(
        nodes=nodes,
        edges=edges,
        num_waiting=len(waits.operations),
        num_waited_for=len(waits.roots),
        is_of_finding=False,
        capped=capped(len(shown), len(order)),
    )


def _fold(window: StoredWindow, waits: Waits, standings: Standings) -> _Fold:
    ranks = sorted({*waits.operations, *waits.lacking})
    apart = set(waits.roots) if len(waits.roots) <= MAX_ROOTS_APART else set[int]()
    labels = _numbered({
        rank: ("root", rank) if rank in apart
        else ("waits", operation.name, _family(window, operation), rank in waits.stuck)
        if (operation := waits.operations.get(rank)) is not None
        else ("lacking", standings.of(rank))
        for rank in ranks
    })  # fmt: skip
    if waits.stuck:
        labels[_TRANSFER] = len(labels) + 1
    for _ in range(_MAX_ROUNDS):
        targets_of = _Targets(waits, labels)
        finer = _numbered({rank: (label, targets_of(rank)) for rank, label in labels.items()})
        is_stable = len(set(finer.values())) == len(set(labels.values()))
        labels = finer
        if is_stable:
            break
    members: dict[int, list[int]] = defaultdict(list)
    for rank, label in labels.items():
        members[label].append(rank)
    targets_of = _Targets(waits, labels)
    targets = {label: set(targets_of(some[0])) for label, some in members.items()}
    return _Fold(labels, members, targets)


class _Targets:
    """The labels of the ranks that a rank waits for; worked out once for each operation."""

    def __init__(self, waits: Waits, labels: Mapping[int, int]) -> None:
        self._waits, self._labels = waits, labels
        self._known: dict[int, frozenset[int]] = {}

    def __call__(self, rank: int) -> frozenset[int]:
        operation = self._waits.operations.get(rank)
        if operation is None:
            return frozenset()
        if rank in self._waits.stuck:
            return frozenset((self._labels[_TRANSFER],))
        if id(operation) not in self._known:
            self._known[id(operation)] = frozenset(self._labels[o] for o in operation.lacks)
        return self._known[id(operation)]


def _numbered(labels: Mapping[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(label, len(numbers)) for rank, label in labels.items()}


def _family(window: StoredWindow, operation: OpenOperation) -> Hashable:
    """Return what groups of one dimension of a mesh share."""
    description = window.descriptions.get(operation.group, "")
    return _DIGITS.sub("#", description), len(operation.members)


def _depths(window: StoredWindow, waits: Waits, found: _Fold) -> dict[int, int]:
    """Return how many others stand between ranks and those that all wait for."""
    labels = {found.label_of[rank] for rank in waits.roots}
    labels |= {label for label, targets in found.targets.items() if not targets}
    into: dict[int, set[int]] = defaultdict(set)
    for label, targets in found.targets.items():
        for target in targets:
            into[target].add(label)
    depth = dict.fromkeys(labels, 0)
    frontier = labels
    while frontier:
        frontier = {one for label in frontier for one in into[label]} - depth.keys()
        depth |= dict.fromkeys(frontier, max(depth.values()) + 1)
    return depth


def _node(
    window: StoredWindow, waits: Waits, standings: Standings, say: words.Say,
    place: int, depth: int, members: list[int],
) -> WaitNode:  # fmt: skip
    is_transfer = members == [_TRANSFER]
    inside = [waits.operations[rank] for rank in members if rank in waits.operations]
    lacked = [waits.lacking[rank] for rank in members if rank in waits.lacking]
    held = [waits.held[rank] for rank in members if rank in waits.held]
    if is_transfer:
        inside = [waits.operations[rank] for rank in sorted(waits.stuck)]
    standing = "waiting" if is_transfer else standings.of(members[0])
    own = [waits.waited_seconds[rank] for rank in members if rank in waits.waited_seconds]
    return WaitNode(
        id=place,
        depth=depth,
        standing=standing,
        is_root=not is_transfer and members[0] in set(waits.roots),
        is_transfer=is_transfer,
        ranks=rank_set(window, [] if is_transfer else members),
        text=say.transfer(inside)
        if is_transfer
        else say.node(standing, len(members), inside, lacked, held),
        operation=(inside or lacked)[0].name if inside or lacked else "",
        num_groups=len({operation.group for operation in inside}),
        waited_seconds=max(own, default=None),
    )
