"""clock.offset: what time it is on each node."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import ordered, shortened
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

WARN_MS = 1_000.0  # logs and traces of nodes no longer line up
FAIL_MS = 10_000.0  # c10d drops a node 15 s behind; measured: 12 s trains, 16 s is left out
Known = dict[str, tuple[float, float]]  # by node: offset and its uncertainty, ms


class ClockOffset:
    """The clocks of all nodes agree within a second.

    c10d compares other nodes' heartbeats with the local clock: who is more than 15 s behind is
    dropped without a word, and the others train with a smaller world and end with success.
    """

    id: ClassVar[str] = "clock.offset"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Hold each clock against those of the majority."""
        if len(run.present) < 2:
            return
        near = _near(run)
        known = _offsets(near, max(near, key=lambda node: (len(near[node]), node), default=""))
        lone = [report.node for report in run.present if report.node not in known]
        if lone:
            names = ordered(run, lone)
            title = f"{listed(names)}: its clock could not be compared"
            yield Finding(id=self.id, status="unknown", nodes=names, title=title)
        if len(known) < 2:
            return
        root, is_majority = _reference(known)
        known = _offsets(near, root)
        limits: tuple[tuple[Status, float, float], ...] = (
            ("fail", FAIL_MS, math.inf),
            ("warn", WARN_MS, FAIL_MS),
        )
        for status, low, high in limits:
            odd = {
                node: value
                for node, (value, unsure) in known.items()
                if low < abs(value) - unsure <= high
            }
            if odd:
                yield self._finding(run, status, odd, known, is_majority)

    def _finding(
        self, run: Run, status: Status, odd: dict[str, float], known: Known, is_majority: bool
    ) -> Finding:
        nodes = ordered(run, odd)
        worst = max(odd.values(), key=abs)
        if is_majority:
            title = "; ".join(f"{node}'s clock is {_words(odd[node])}" for node in nodes[:4])
            title += f" and {len(nodes) - 4} more" if nodes[4:] else ""
        else:
            all_nodes = listed(ordered(run, known))
            title = f"clocks of {all_nodes} are {abs(worst) / 1e3:.1f} s apart: either is wrong"
        others = nodes if is_majority else ordered(run, known)
        return Finding(
            id=self.id,
            status=status,
            title=title,
            nodes=nodes if is_majority else (),
            evidence={
                "offset_ms": {node: round(value, 1) for node, value in odd.items()},
                "uncertainty_ms": {node: round(known[node][1], 3) for node in odd},
            },
            told=shortened(
                f"{node}: {_words(odd[node])}, to within {known[node][1]:.1f} ms" for node in nodes
            ),
            fix=tuple(
                Fix(
                    node=node,
                    command="sudo chronyc makestep || sudo timedatectl set-ntp true",
                    owner="admin",
                )
                for node in others[:4]
            ),
            wrong_if="the clock was being set at that very moment",
        )


def _words(offset_ms: float) -> str:
    return f"{abs(offset_ms) / 1e3:.1f} s {'ahead' if offset_ms > 0 else 'behind'}"


def _near(run: Run) -> dict[str, Known]:
    """Return the clocks that were compared, both ways, the surer figure of the two ends."""
    near: dict[str, Known] = defaultdict(dict)
    for start, end, edge in run.edges():
        if edge.clock is None or end not in run.reports:
            continue
        offset, unsure = edge.clock.offset_ms, edge.clock.uncertainty_ms
        told = near[start].get(end)
        if told is None or unsure < told[1]:
            near[start][end] = (offset, unsure)
            near[end][start] = (-offset, unsure)
    return near


def _offsets(near: dict[str, Known], root: str) -> Known:
    """Return clocks against that of `root`, over the shortest chain of pairs."""
    known: Known = {root: (0.0, 0.0)} if root else {}
    queue = deque(known)
    while queue:
        node = queue.popleft()
        for peer, (offset, unsure) in near[node].items():
            if peer not in known:
                known[peer] = (known[node][0] + offset, known[node][1] + unsure)
                queue.append(peer)
    return known


def _reference(known: Known) -> tuple[str, bool]:
    """Return the middle node of the largest group of clocks, and whether it is a majority."""
    clocks = sorted((value, node) for node, (value, _) in known.items())
    best = clocks[:1]
    first = 0
    for last, (value, _) in enumerate(clocks):
        while value - clocks[first][0] > WARN_MS:
            first += 1
        if last - first + 1 > len(best):
            best = clocks[first : last + 1]
    return best[len(best) // 2][1], 2 * len(best) > len(clocks)
