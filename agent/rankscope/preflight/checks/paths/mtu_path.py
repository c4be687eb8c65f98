"""net.mtu.path: large packets that vanish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.blame import Blame, blame
from rankscope.preflight.checks.pairs import arrows, interface_towards, ordered, shortened
from rankscope.preflight.checks.paths.quality import both_ends, who
from rankscope.preflight.facts.edges import PathMtu
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetMtuPath:
    """Large messages pass wherever small ones do.

    A path that carries less than the interfaces say, without a word back, passes every small
    test: gloo connects, reduces one number, and then waits for 30 minutes.
    """

    id: ClassVar[str] = "net.mtu.path"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Blame the node on all bad paths, or the pair."""
        paths = {(a, b): edge.mtu for a, b, edge in both_ends(run) if edge.mtu is not None}
        stalled = {path for path, mtu in paths.items() if not mtu.large_ok}
        # an echo goes both ways, so a path that is bad one way is bad both ways
        stalled |= {(b, a) for a, b in stalled if (b, a) in paths}
        bad = {
            (a, b)
            for a, b in stalled
            if any(_is_narrow(paths[path]) for path in ((a, b), (b, a)) if path in paths)
        }
        found = blame([path for path in paths if path in bad], list(paths))
        for one in found:
            yield self._finding(run, one, paths)
        if stalled - bad:
            title = f"{arrows(sorted(stalled - bad))}: 64 kB did not come back in time, though "
            title += "packets of full size pass"
            edges = tuple(sorted(stalled - bad))
            yield Finding(id=self.id, status="unknown", title=title, edges=edges)

    def _finding(self, run: Run, one: Blame, paths: dict[tuple[str, str], PathMtu]) -> Finding:
        mtus = [paths[path] for path in one.paths]
        carried = min((m.carried_bytes for m in mtus if m.carried_bytes), default=0)
        says = max(m.interface_bytes for m in mtus)
        about = "about " if any(m.how == "clamp" for m in mtus) else ""
        carry = f"carry {about}{carried} bytes" if carried else "carry no large packet"
        ends = one.nodes or tuple({node for path in one.paths for node in path})
        told = [
            f"{a}->{b}  {m.carried_bytes} bytes by {m.how}, 64 kB over TCP "
            + (f"in {m.large_ms:.0f} ms" if m.large_ok else "stalls")
            for (a, b), m in zip(one.paths, mtus, strict=True)
        ]
        return Finding(
            id=self.id,
            status="fail",
            title=f"{who(run, one)} {carry}, interfaces say {says}: large messages vanish",
            nodes=one.nodes,
            edges=one.paths,
            evidence={"carried_bytes": carried, "interface_bytes": says, "side": one.side},
            told=shortened(told),
            fix=tuple(
                Fix(node=node, command=_command(run, node, one, carried), owner="admin")
                for node in ordered(run, ends)
            ),
            wrong_if="a firewall holds back large packets for another reason than their size",
        )


def _is_narrow(mtu: PathMtu) -> bool:
    """Return whether a path carries less than its interface sends: else it is slow or lossy."""
    return mtu.carried_bytes < mtu.interface_bytes or not mtu.interface_bytes


def _command(run: Run, node: str, one: Blame, carried: int) -> str:
    peer = next((b if a == node else a for a, b in one.paths if node in (a, b)), "")
    interface = interface_towards(run, node, peer)
    name = interface.name if interface is not None else "$(ip route | awk '/^default/{print $5}')"
    return f"sudo ip link set {name} mtu {carried or 1280}"
