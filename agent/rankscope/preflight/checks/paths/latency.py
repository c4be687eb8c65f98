"""net.latency: round trips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame, Path
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import interface_towards, ordered, shortened, silent
from rankscope.preflight.checks.paths.quality import (
    blamed,
    both_ends,
    high,
    seen_from_both,
    usual,
    who,
)
from rankscope.preflight.model import Finding, Fix, Scope, Tier

RATIO = 5.0  # above the usual round trip; racks of one cluster differ by 2 to 3
FLOOR_MS = 5.0  # below, no all-reduce of a training step is bound by it
SURE_MS = 60.0  # a busy machine delays by a few 20 ms slices; the best of 12 is never that late
BUSY_MS = 15.0  # p90 by which a 20 ms sleep is late: above, a shorter time cannot be trusted


class NetLatency:
    """No pair is much slower to answer than the others.

    The best of 12 round trips, the lower of what both ends measured, against the median of all.
    """

    id: ClassVar[str] = "net.latency"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})  # busy nodes: see below

    def judge(self, run: Run) -> Iterator[Finding]:
        """Compare all pairs; of a busy node only what is beyond any delay of its own."""
        measured = {(a, b): e.rtt.min_ms for a, b, e in both_ends(run) if e.rtt is not None}
        values = seen_from_both(measured)
        busy = {r.node for r in run.present if r.delay_p90_ms > BUSY_MS}
        middle = usual(values)
        bad = [
            path
            for path in dict.fromkeys((*high(values, RATIO, FLOOR_MS), *_far(values)))
            if values[path] > SURE_MS or not busy & {*path}
        ]
        for one, nodes in blamed(bad, values):
            yield self._finding(run, one, nodes, values, middle)
        if busy and values:
            worst = max(run.reports[node].delay_p90_ms for node in busy)
            title = f"not judged below {SURE_MS:g} ms: {listed(ordered(run, busy))} too busy "
            title += f"to time a path (a 20 ms sleep took {worst:.0f} ms more)"
            yield Finding(id=self.id, status="unknown", nodes=ordered(run, busy), title=title)
        if not values and len(run.present) > 1:
            yield from silent(self.id, run, [report.node for report in run.present])

    def _finding(
        self, run: Run, one: Blame, nodes: tuple[str, ...], values: dict[Path, float],
        middle: float | None,
    ) -> Finding:  # fmt: skip
        worst_ms = max(values[path] for path in one.paths)
        usual_text = f"; usual here is {middle:.2g} ms" if middle else ""
        start, end = one.paths[0]
        return Finding(
            id=self.id,
            status="warn",
            title=f"{who(run, one)}: round trip of {worst_ms:.0f} ms{usual_text}",
            nodes=nodes,
            edges=one.paths,
            evidence={"round_trip_ms": round(worst_ms, 3), "usual_ms": middle},
            told=shortened(
                f"{a}->{b}  {values[a, b]:.1f} ms, best of 12 round trips" for a, b in one.paths
            ),
            fix=(Fix(node=start, command=_trace(run, start, end)),),
            wrong_if="the nodes are in different places on purpose",
        )


def _far(values: dict[Path, float]) -> tuple[Path, ...]:
    """Return what is slow for any cluster, also where there is nothing to compare with."""
    return tuple(path for path, value in values.items() if value > SURE_MS)


def _trace(run: Run, start: str, end: str) -> str:
    interface = interface_towards(run, start, end)
    through = f" -i {interface.name}" if interface is not None else ""
    return f"traceroute -n{through} {run.gloo_address(end) or end}"
