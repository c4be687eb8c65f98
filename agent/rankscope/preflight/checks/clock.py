"""Clocks: the time on each node, and what keeps it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.pairs import ordered, shortened
from rankscope.preflight.model import CheckFinding, NodeReport, Status

WARN_MS = 1_000.0  # logs and traces of nodes no longer line up
FAIL_MS = 10_000.0  # c10d drops a node 15 s behind; measured: 12 s trains, 16 s is left out
Known = dict[str, tuple[float, float]]  # by node: offset and its uncertainty, ms


class ClockOffset(BuiltinCheck, id="clock.offset", scope="all", needs=("peers",)):
    """The clocks of all nodes agree within a second.

    c10d compares other nodes' heartbeats with the local clock: who is more than 15 s behind is
    dropped without a word, and the others train with a smaller world and end with success.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Compare each clock with those of the majority."""
        if len(run.present) < 2:
            return
        near = _near(run)
        known = _offsets(near, max(near, key=lambda node: (len(near[node]), node), default=""))
        lone = ordered(run, [report.node for report in run.present if report.node not in known])
        yield from self.note("unknown", lone, "its clock could not be compared")
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
    ) -> CheckFinding:
        nodes = ordered(run, odd)
        worst = max(odd.values(), key=abs)
        if is_majority:
            title = "; ".join(f"{node}'s clock is {_offset_words(odd[node])}" for node in nodes[:4])
            title += f" and {len(nodes) - 4} more" if nodes[4:] else ""
        else:
            all_nodes = listed(ordered(run, known))
            title = f"clocks of {all_nodes} are {abs(worst) / 1e3:.1f} s apart: either is wrong"
        others = nodes if is_majority else ordered(run, known)
        return self.finding(
            status,
            title,
            nodes=nodes if is_majority else (),
            evidence={
                "offset_ms": {node: round(value, 1) for node, value in odd.items()},
                "uncertainty_ms": {node: round(known[node][1], 3) for node in odd},
            },
            lines=shortened(
                f"{node}: {_offset_words(odd[node])}, to within {known[node][1]:.1f} ms"
                for node in nodes
            ),
            fix=on_each(
                others[:4], "sudo chronyc makestep || sudo timedatectl set-ntp true", "admin"
            ),
            unless="the clock was being set at that very moment",
        )


def _offset_words(offset_ms: float) -> str:
    return f"{abs(offset_ms) / 1e3:.1f} s {'ahead' if offset_ms > 0 else 'behind'}"


def _near(run: Run) -> dict[str, Known]:
    """Return the clocks that were compared, both ways, the surer figure of the two ends."""
    near: dict[str, Known] = defaultdict(dict)
    for start, end, edge in run.edges():
        if edge.clock is None or end not in run.reports:
            continue
        offset, unsure = edge.clock.offset_ms, edge.clock.uncertainty_ms
        before = near[start].get(end)
        if before is None or unsure < before[1]:
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


APART_MS = 100.0  # NTP keeps machines within some ms; a tenth of what `clock.offset` warns of


class ClockSync(BuiltinCheck, id="clock.sync", needs=("peers",)):
    """A service keeps the clock of every machine, so that they do not drift apart.

    That the kernel knows of no such service proves little: many a virtual machine has its clock
    from its host. It is reported only where the clocks are apart already.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where the kernel says STA_UNSYNC and clocks are seen to be apart."""
        yield from self.not_measured(run, "host")
        hosts = run.each(lambda facts: facts.host)
        unknown = [node for node, host in hosts.items() if host.clock_is_synchronised is None]
        yield from self.note("unknown", unknown, "the kernel does not say (adjtimex)")
        loose = [node for node, host in hosts.items() if host.clock_is_synchronised is False]
        apart_ms = {node: _apart_ms(run.reports[node]) for node in loose}
        loose = [node for node in loose if apart_ms[node] >= APART_MS]
        if not loose:
            return
        yield self.warn(
            f"the clock is not synchronised (STA_UNSYNC), and it is "
            f"{max(apart_ms[node] for node in loose):.0f} ms apart from the others",
            at=loose,
            evidence={node: {"apart_ms": round(apart_ms[node], 1)} for node in loose},
            lines=("clocks that are not synchronised drift apart by up to some seconds a day",),
            fix=on_each(loose, "sudo systemctl enable --now chrony", "admin"),
            impact="today nothing; from 15 s behind the others on, a c10d rendezvous drops the "
            "node without a word and trains with a smaller world",
            unless="the host of a virtual machine sets its clock and the kernel does not know",
        )


def _apart_ms(report: NodeReport) -> float:
    """Return how far the clock of a node is from the nearest one of its peers."""
    seen = [abs(e.clock.offset_ms) for e in report.edges.values() if e.clock is not None]
    return min(seen, default=0.0)
