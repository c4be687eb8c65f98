"""net.loss: packets that do not arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame, Path
from rankscope.preflight.checks.pairs import interface_towards, ordered, shortened
from rankscope.preflight.checks.paths.quality import blamed, both_ends, who
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

LIMIT_RATIO = 0.005  # of datagrams there and back; a sound path loses fewer than 0.0001
MIN_LOST = 4  # of 400: fewer may be one stray burst
TCP_RATIO = 0.005  # retransmitted segments: an overflowing queue alone makes as many, no more
TCP_ALONE_RATIO = 0.02  # where UDP is closed there is nothing else to go by
QUEUE_MBIT = 100.0  # slower than that, TCP fills a queue until it overflows: loss is its way


class NetLoss:
    """Hardly any packet of a pair is lost.

    Small datagrams at a gentle pace, so that no queue overflows. Both ends must miss answers, and
    TCP must have sent again as well: a receiver that was late loses datagrams, too.
    """

    id: ClassVar[str] = "net.loss"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "cpu-pace"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Judge pairs, as a datagram goes there and back."""
        edges = {(a, b): edge for a, b, edge in both_ends(run) if _is_measured(edge)}
        ratios = {path: _lost(edge, edges.get(path[::-1])) for path, edge in edges.items()}
        for one, nodes in blamed([path for path, lost in ratios.items() if lost], edges):
            yield self._finding(run, one, nodes, edges, ratios)
        if not edges and len(run.present) > 1:
            title = "neither datagrams nor the bandwidth of any pair was measured"
            yield Finding(id=self.id, status="unknown", title=title)

    def _finding(
        self, run: Run, one: Blame, nodes: tuple[str, ...], edges: dict[Path, EdgeFacts],
        ratios: dict[Path, float],
    ) -> Finding:  # fmt: skip
        ratio = max(ratios[path] for path in one.paths)
        start, end = one.paths[0]
        return Finding(
            id=self.id,
            status="warn",
            title=f"{who(run, one)}: {ratio * 100:.1f} % of packets are lost",
            nodes=nodes,
            edges=one.paths,
            evidence={"lost_ratio": round(ratio, 5)},
            told=shortened(f"{a}->{b}  {_words(edges[a, b])}" for a, b in one.paths),
            fix=tuple(
                Fix(node=node, command=_counters(run, node, end if node == start else start),
                    owner="admin")
                for node in (ordered(run, nodes) or (start, end))[:4]
            ),
            wrong_if="other traffic filled the path at that moment",
        )  # fmt: skip


def _has_datagrams(edge: EdgeFacts) -> bool:
    """Return whether UDP is open: no answer at all is a closed port."""
    return edge.datagrams is not None and edge.datagrams.num_answered > 0


def _is_measured(edge: EdgeFacts) -> bool:
    return _has_datagrams(edge) or _sent_again(edge) is not None


def _sent_again(edge: EdgeFacts) -> float | None:
    """Return the share of segments that TCP sent twice, 0 to 1; None: not known."""
    sent = edge.bandwidth
    if sent is None or not sent.num_segments:
        return None
    return sent.num_retransmits / sent.num_segments


def _lost(edge: EdgeFacts, back: EdgeFacts | None) -> float:
    """Return the share of packets that a pair surely loses; 0 where that is not sure."""
    ends = [end for end in (edge, back) if end is not None]
    again = [share for end in ends if (share := _sent_again(end)) is not None]
    told = [end.datagrams for end in ends if end.datagrams is not None and _has_datagrams(end)]
    if not told:
        sent = edge.bandwidth
        if sent is None or sent.num_retransmits < MIN_LOST or sent.mbit_per_s < QUEUE_MBIT:
            return 0.0
        return again[0] if again[0] > TCP_ALONE_RATIO else 0.0
    if again and max(again) < TCP_RATIO:
        return 0.0
    lost = [(one.num_sent - one.num_answered, one.num_sent) for one in told]
    if any(num < MIN_LOST or num < LIMIT_RATIO * total for num, total in lost):
        return 0.0
    return min(num / total for num, total in lost)


def _words(edge: EdgeFacts) -> str:
    words = []
    if edge.datagrams is not None and edge.datagrams.num_answered:
        lost = edge.datagrams.num_sent - edge.datagrams.num_answered
        words.append(f"{lost} of {edge.datagrams.num_sent} datagrams lost there or back")
    if edge.bandwidth is not None and edge.bandwidth.num_segments:
        sent = edge.bandwidth
        words.append(f"{sent.num_retransmits} of {sent.num_segments} segments sent again")
    return ", ".join(words)


def _counters(run: Run, node: str, peer: str) -> str:
    interface = interface_towards(run, node, peer)
    name = interface.name if interface is not None else ""
    return f"ip -s link show {name} && ethtool {name}" if name else "ip -s link"
