"""net.loss: packets that are sent again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checking import Need, Run
from rankscope.preflight.checks.paths.quality import blamed, both_ends, who
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier
from rankscope.preflight.pairs import interface_towards, ordered, shortened

LIMIT_RATIO = 0.005  # retransmitted segments; a full queue of a sound 10 Gbit/s path: 0.0001
MIN_RETRANSMITS = 4  # fewer happen by a single burst
SEGMENT_BITS = 1448 * 8
MATHIS = 1.22  # rate <= MATHIS x segment / (round trip x sqrt(loss)), Mathis et al. 1997
QUEUE_SHARE = 0.05  # of that rate: slower, and loss is not what holds it back, but a full queue


class NetLoss:
    """Hardly any segment of the bandwidth test has to be sent again.

    A limited rate loses packets too, out of its full queue: that is left to `net.bandwidth`.
    """

    id: ClassVar[str] = "net.loss"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "cpu-pace"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Blame the side on which segments get lost."""
        edges = {
            (a, b): edge
            for a, b, edge in both_ends(run)
            if edge.bandwidth is not None and edge.bandwidth.num_segments > 0
        }
        bad = {path: edge for path, edge in edges.items() if _is_lossy(edge)}
        for one, nodes in blamed(bad, edges):
            ratio = max(lost_ratio(bad[path]) for path in one.paths)
            start, end = one.paths[0]
            yield Finding(
                id=self.id,
                status="warn",
                title=f"{who(run, one)}: {ratio * 100:.1f} % of segments are lost",
                nodes=nodes,
                edges=one.paths,
                evidence={"lost_ratio": round(ratio, 5)},
                told=shortened(
                    f"{path[0]}->{path[1]}  {edge.bandwidth.num_retransmits} of "
                    f"{edge.bandwidth.num_segments} segments sent again, "
                    f"{edge.bandwidth.mbit_per_s:.0f} Mbit/s"
                    for path in one.paths
                    if (edge := bad[path]).bandwidth is not None
                ),
                fix=tuple(
                    Fix(node=node, command=_counters(run, node, end if node == start else start),
                        owner="admin")
                    for node in (ordered(run, nodes) or (start, end))[:4]
                ),
                wrong_if="other traffic filled the path at that moment",
            )  # fmt: skip


def lost_ratio(edge: EdgeFacts) -> float:
    """Return the share of segments that were sent again, 0 to 1."""
    sent = edge.bandwidth
    return sent.num_retransmits / sent.num_segments if sent and sent.num_segments else 0.0


def _is_lossy(edge: EdgeFacts) -> bool:
    sent = edge.bandwidth
    if sent is None or sent.num_retransmits < MIN_RETRANSMITS:
        return False
    ratio = lost_ratio(edge)
    if ratio <= LIMIT_RATIO:
        return False
    round_trip_s = max(edge.rtt.min_ms if edge.rtt is not None else 1.0, 0.05) / 1e3
    possible = MATHIS * SEGMENT_BITS / (round_trip_s * math.sqrt(ratio)) / 1e6
    return sent.mbit_per_s > QUEUE_SHARE * possible


def _counters(run: Run, node: str, peer: str) -> str:
    interface = interface_towards(run, node, peer)
    name = interface.name if interface is not None else ""
    return f"ip -s link show {name} && ethtool {name}" if name else "ip -s link"
