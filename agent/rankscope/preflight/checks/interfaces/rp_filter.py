"""net.rp_filter: the kernel does not drop what peers send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.interfaces.asymmetry import STRICT, Crooked, crooked_paths
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class NetRpFilter:
    """No strict rp_filter drops packets that come in by another way than replies go out.

    A strict filter by itself is no fault: only with a route that leaves by another interface, and
    a dial that failed.
    """

    id: ClassVar[str] = "net.rp_filter"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the three meet."""
        by_place: dict[tuple[str, str], list[Crooked]] = {}
        for path in crooked_paths(run):
            if path.dropped_by:
                by_place.setdefault((path.dropped_by, path.dropped_at), []).append(path)
        for (node, interface), paths in by_place.items():
            yield self._finding(node, interface, paths)

    def _finding(self, node: str, interface: str, paths: list[Crooked]) -> Finding:
        edges = tuple(dict.fromkeys(path.dropped_edge for path in paths))
        return Finding(
            id=self.id,
            status="fail",
            nodes=(node,),
            edges=edges,
            title=f"{node} drops what {listed([start for start, _ in edges])} sends to "
            f"{interface}: strict rp_filter, and the way back is another one",
            evidence={
                "rp_filter": STRICT,
                "interface": interface,
                "paths": [
                    {
                        "from": p.node,
                        "to": p.peer,
                        "source": p.source_address,
                        "told": p.told_address,
                    }
                    for p in paths
                ],
            },
            told=tuple(
                f"{p.node} calls {p.peer} from {p.source_address} ({p.source.name}), but tells "
                f"the others {p.told_address} ({p.told.name})"
                for p in paths[:4]
            ),
            fix=(
                Fix(
                    node=node,
                    command="sudo sysctl -w net.ipv4.conf.all.rp_filter=2 "
                    f"net.ipv4.conf.{interface}.rp_filter=2",
                    owner="admin",
                ),
            ),
            would="works or hangs for more than 30 min, by which node has the higher address: "
            "one direction is dropped, the other is not",
            confidence="likely",
        )
