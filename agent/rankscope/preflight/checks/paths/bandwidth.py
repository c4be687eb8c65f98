"""net.bandwidth: how fast pairs are, measured while nobody else talks to either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame, Path
from rankscope.preflight.checks.pairs import interface_towards, ordered, shortened
from rankscope.preflight.checks.paths.jitter import NetJitter
from rankscope.preflight.checks.paths.latency import NetLatency
from rankscope.preflight.checks.paths.loss import NetLoss
from rankscope.preflight.checks.paths.quality import blamed, both_ends, who
from rankscope.preflight.facts.edges import Bandwidth
from rankscope.preflight.model import Finding, Fix, Scope, Tier
from rankscope.preflight.probe.schedule import slow_limit, usual

LEAST_SHARE = 0.1  # of a core: an end that had less than a tenth of one proves nothing more


class NetBandwidth:
    """No pair is much slower than the others, nor slower than --expect-gbps.

    A slow figure counts once a second, exclusive measurement has confirmed it. A node is named
    when it is slow with two partners or more.
    """

    id: ClassVar[str] = "net.bandwidth"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "cpu-pace"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail below what was asked for, warn far below what is usual here."""
        speeds = {
            (a, b): edge.bandwidth for a, b, edge in both_ends(run) if edge.bandwidth is not None
        }
        if not speeds:
            title = "no pair was measured"
            yield Finding(id=self.id, status="unknown", title=title)
            return
        figures = {path: speed.mbit_per_s for path, speed in speeds.items()}
        middle = usual(figures)
        wanted = run.options.expect_gbps * 1e3
        if not middle and not wanted:
            title = "nothing to compare with: two good pairs at least, or --expect-gbps"
            yield Finding(id=self.id, status="skipped", title=title)
        limit = max(slow_limit(figures), wanted)
        bad = [path for path, speed in speeds.items() if _best(speed) < limit]
        known = _known(run) if bad else set()
        # apart: a pair that jitters is no second partner with which a node would be slow
        for some in ([p for p in bad if p not in known], [p for p in bad if p in known]):
            for one, nodes in blamed(some, speeds):
                if any(_is_confirmed(speeds[path]) for path in one.paths):
                    yield self._finding(run, one, nodes, speeds, (middle, wanted))

    def _finding(
        self, run: Run, one: Blame, nodes: tuple[str, ...], speeds: dict[Path, Bandwidth],
        against: tuple[float, float],
    ) -> Finding:  # fmt: skip
        middle, wanted = against
        sure = [path for path in one.paths if _is_confirmed(speeds[path])]
        slowest = min(_measured(speeds[path]) for path in sure)
        than = f"{wanted:.0f} Mbit/s asked for" if slowest < wanted else f"usual is {middle:.0f}"
        start, end = min(sure, key=lambda path: _best(speeds[path]))
        return Finding(
            id=self.id,
            status="fail" if slowest < wanted else "warn",
            title=f"{who(run, one)}: {_short(slowest)} Mbit/s; {than}",
            nodes=nodes,
            edges=one.paths,
            evidence={
                "mbit_per_s": round(slowest, 2),
                "usual_mbit_per_s": round(middle, 1),
                "asked_mbit_per_s": wanted,
            },
            told=shortened(
                f"{a}->{b}  {_short(speeds[a, b].mbit_per_s)} Mbit/s"
                + (
                    f", again {_short(speeds[a, b].again_mbit_per_s)}"
                    if _is_confirmed(speeds[a, b])
                    else ""
                )
                for a, b in sorted(one.paths, key=lambda path: not _is_confirmed(speeds[path]))
            ),
            fix=tuple(
                Fix(node=node, command=_look(run, node, end if node == start else start),
                    owner="admin")
                for node in (ordered(run, nodes) or (start, end))[:4]
            ),
            wrong_if="other traffic filled the path both times",
        )  # fmt: skip


def _known(run: Run) -> set[Path]:
    """Return the paths whose slowness another check explains."""
    checks = (NetLatency(), NetJitter(), NetLoss())
    found = [one for check in checks for one in check.judge(run) if one.status == "warn"]
    paths = {path for one in found for path in one.edges}
    return paths | {(end, start) for start, end in paths}


def _best(speed: Bandwidth) -> float:
    """Return what the path carries at least: the ends may have had no core for a part of it."""
    share = max(1.0 - speed.waited_ratio, LEAST_SHARE)
    return max(speed.mbit_per_s, speed.again_mbit_per_s) / share


def _measured(speed: Bandwidth) -> float:
    return max(speed.mbit_per_s, speed.again_mbit_per_s)


def _is_confirmed(speed: Bandwidth) -> bool:
    """Return whether this very path was measured again."""
    return speed.again_mbit_per_s >= 0 and not speed.again_with


def _short(mbit_per_s: float) -> str:
    return f"{mbit_per_s:.0f}" if mbit_per_s >= 10 else f"{mbit_per_s:.1f}"


def _look(run: Run, node: str, peer: str) -> str:
    interface = interface_towards(run, node, peer)
    if interface is None:
        return "ip -s link; tc qdisc"
    return f"ethtool {interface.name}; tc -s qdisc show dev {interface.name}"
