"""net.route.sym: both directions of a path use the same address of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.interfaces.asymmetry import Crooked, crooked_paths
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetRouteSym:
    """Packets leave with the address that the node tells the others."""

    id: ClassVar[str] = "net.route.sym"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where such a path does not work, warn where it does."""
        by_node: dict[str, list[Crooked]] = {}
        for path in crooked_paths(run):
            if not path.dropped_by:  # that is net.rp_filter's
                by_node.setdefault(path.node, []).append(path)
        for node, paths in by_node.items():
            yield self._finding(run, node, paths)

    def _finding(self, run: Run, node: str, paths: list[Crooked]) -> Finding:
        first, peers = paths[0], [path.peer for path in paths]
        is_broken = any(path.is_broken for path in paths)
        return Finding(
            id=self.id,
            status="fail" if is_broken else "warn",
            nodes=(node,),
            edges=tuple((node, peer) for peer in peers),
            title=f"{node} calls {listed(peers)} from {first.source_address} "
            f"({first.source.name}), but tells them {first.told_address} ({first.told.name})",
            evidence={p.peer: {"source_address": p.source_address} for p in paths},
            told=tuple(
                f"{node}->{p.peer} is sent from {p.source_address}, of {p.source.name}"
                for p in paths[:4]
            ),
            fix=_route(run, first),
            would="connections are lost where a firewall or rp_filter sees only one direction"
            if is_broken
            else "works today; fails where rp_filter is 1 or a firewall follows connections",
            wrong_if="the two interfaces are meant to share the load",
        )


def _route(run: Run, path: Crooked) -> tuple[Fix, ...]:
    """Return the route that sends packets out where the answers come in."""
    peer = run.gloo_address(path.peer)
    if not peer:
        return ()
    command = f"sudo ip route replace {peer} dev {path.told.name} src {path.told_address}"
    return (
        Fix(node=path.node, command=command, owner="admin"),
        Fix(node=path.node, command=f"export GLOO_SOCKET_IFNAME={path.source.name}"),
    )
