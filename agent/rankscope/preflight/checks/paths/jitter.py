"""net.jitter: round trips that vary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Path
from rankscope.preflight.checks.pairs import shortened
from rankscope.preflight.checks.paths.quality import blamed, both_ends, high, seen_from_both, who
from rankscope.preflight.model import Finding, Fix, Scope, Tier

RATIO = 5.0  # above what is usual here
FLOOR_MS = 5.0  # between the best and the middle round trip; a healthy LAN has 0.1 ms
SHARE = 0.5  # of the best round trip: below, the distance is what costs, see net.latency
DELAYS = 2.0  # p90 of the own delay to be taken off, for each of two ends that answer late


class NetJitter:
    """Round trips of a pair do not vary much more than those of the others.

    The median less the minimum: a single late answer, as of one lost packet, is not jitter.
    """

    id: ClassVar[str] = "net.jitter"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "cpu-pace"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Compare all pairs; both ends must have seen it."""
        rtts = {(a, b): edge.rtt for a, b, edge in both_ends(run) if edge.rtt is not None}
        spread = seen_from_both({path: r.median_ms - r.min_ms for path, r in rtts.items()})
        bad = [
            path
            for path in high(spread, RATIO, FLOOR_MS)
            if spread[path] > max(_own_ms(run, path), SHARE * rtts[path].min_ms)
        ]
        for one, nodes in blamed(bad, spread):
            worst = max(one.paths, key=lambda path: rtts[path].max_ms - rtts[path].min_ms)
            rtt = rtts[worst]
            yield Finding(
                id=self.id,
                status="warn",
                title=f"{who(run, one)}: round trips vary from {rtt.min_ms:.1f} ms to "
                f"{rtt.max_ms:.1f} ms",
                nodes=nodes,
                edges=one.paths,
                evidence={
                    "min_ms": rtt.min_ms, "median_ms": rtt.median_ms, "p95_ms": rtt.p95_ms,
                    "max_ms": rtt.max_ms,
                },
                told=shortened(
                    f"{a}->{b}  min {rtts[a, b].min_ms:.1f}, median {rtts[a, b].median_ms:.1f}, "
                    f"p95 {rtts[a, b].p95_ms:.1f}, max {rtts[a, b].max_ms:.1f} ms"
                    for a, b in one.paths
                ),
                fix=(
                    Fix(node=worst[0],
                        command=f"ping -i 0.2 -c 50 {run.gloo_address(worst[1]) or worst[1]}"),
                ),
                wrong_if="other traffic filled the path at that moment",
            )  # fmt: skip


def _own_ms(run: Run, path: Path) -> float:
    """Return what the ends of a path themselves may add to a round trip, in ms."""
    return FLOOR_MS + DELAYS * max(run.reports[node].delay_p90_ms for node in path)
