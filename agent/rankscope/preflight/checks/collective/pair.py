"""coll.pair: which node or pair slows the collectives of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.collective.ends import amount, began
from rankscope.preflight.facts.smoke import SmokeHalf
from rankscope.preflight.model import Finding, Fix, Scope, Tier
from rankscope.wire.formulas import busbw_bytes_per_second

# Groups of equal machines differ by up to 1.7 x while three processes share two cores.
SLOWER_RATIO = 2.5
# 4 MB take 4 ms at 10 Gbit/s and 35 ms at 1 Gbit/s; below this a scheduler's pause may be all.
LEAST_EXCESS_MS = 20.0


class CollPair:
    """No node and no pair makes the collectives of all much slower than the others are."""

    id: ClassVar[str] = "coll.pair"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "smoke", "cpu-pace"})

    def judge(self, run: Run) -> Iterable[Finding]:
        """Return, for each group that ran together, its slow node, or else its slow pair."""
        searches = dict.fromkeys(smoke.halves for smoke in began(run).values() if smoke.halves)
        if not searches:
            title = "needs three nodes or more that got through the collectives"
            yield Finding(id=self.id, status="skipped", title=title)
        for halves in searches:
            if not _is_begun_by_another(halves, searches):
                yield from self._slow(run, halves)

    def _slow(self, run: Run, halves: tuple[SmokeHalf, ...]) -> Iterator[Finding]:
        best = max(halves, key=_speed)
        slow = [half for half in halves if _is_slow(half, best)]
        if not slow:
            return
        fast = {node for half in halves if half not in slow for node in half.nodes}
        suspects = {node for half in slow for node in half.nodes} - fast
        worst = min(slow, key=_speed)
        if len(suspects) == 1:
            yield self._finding(run, worst, best, tuple(suspects), ())
        elif not suspects and len(worst.nodes) == 2:
            yield self._finding(run, worst, best, (), ((worst.nodes[0], worst.nodes[1]),))
        else:
            names = ", ".join(sorted(suspects or worst.nodes))
            title = f"one of {names} slows the collectives; which is not known"
            yield Finding(id=self.id, status="unknown", title=title)

    def _finding(
        self,
        run: Run,
        worst: SmokeHalf,
        best: SmokeHalf,
        nodes: tuple[str, ...],
        edges: tuple[tuple[str, str], ...],
    ) -> Finding:
        who = nodes[0] if nodes else f"the pair {edges[0][0]} and {edges[0][1]}"
        times = _speed(best) / _speed(worst)
        size = amount(worst.size_bytes)
        return Finding(
            id=self.id,
            status="warn",
            title=f"{who} makes an all-reduce of {size} {times:.1f} times slower",
            nodes=nodes,
            edges=edges,
            evidence={
                "slow_ms": worst.elapsed_ms, "slow_nodes": list(worst.nodes),
                "fast_ms": best.elapsed_ms, "fast_nodes": list(best.nodes),
            },
            told=(
                f"among {', '.join(worst.nodes)}: {worst.elapsed_ms:.1f} ms",
                f"among {', '.join(best.nodes)}: {best.elapsed_ms:.1f} ms",
            ),
            fix=tuple(Fix(node=node, command="top -b -n 1 | head -n 15") for node in nodes),
            would=f"each step of all {len(run.expected)} nodes waits for it, without a message",
            wrong_if="something else kept it busy just then: run it again",
            confidence="likely",
        )  # fmt: skip


def _is_begun_by_another(
    halves: tuple[SmokeHalf, ...], searches: Iterable[tuple[SmokeHalf, ...]]
) -> bool:
    """Return whether another node tells the same search further: this one ended early."""
    return any(other[: len(halves)] == halves and other != halves for other in searches)


def _speed(half: SmokeHalf) -> float:
    seconds = max(half.elapsed_ms, 1e-3) / 1e3
    return busbw_bytes_per_second("all_reduce", half.size_bytes, seconds, len(half.nodes)) or 0.0


def _is_slow(half: SmokeHalf, best: SmokeHalf) -> bool:
    ratio = _speed(best) / max(_speed(half), 1e-9)
    excess_ms = half.elapsed_ms * (1 - 1 / ratio)
    return ratio > SLOWER_RATIO and excess_ms > LEAST_EXCESS_MS
