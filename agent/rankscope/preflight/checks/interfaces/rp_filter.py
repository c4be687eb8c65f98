"""net.rp_filter: the kernel does not drop what peers send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checking import Need, Run
from rankscope.preflight.checks.interfaces.asymmetry import Crooked, crooked_paths
from rankscope.preflight.comparing import listed
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
        by_node: dict[str, list[Crooked]] = {}
        for path in crooked_paths(run):
            if path.is_broken and path.is_strict:
                by_node.setdefault(path.node, []).append(path)
        for node, paths in by_node.items():
            first, peers = paths[0], [path.peer for path in paths]
            yield Finding(
                id=self.id,
                status="fail",
                nodes=(node,),
                edges=tuple((peer, node) for peer in peers),
                title=f"{node} drops what {listed(peers)} sends to {first.told.name}: strict "
                f"rp_filter, and the way back is {first.leaves_by.name}",
                evidence={
                    "rp_filter": first.told.rp_filter,
                    "comes_in_by": first.told.name,
                    "leaves_by": first.leaves_by.name,
                },
                told=(
                    f"{node} tells {first.told_address} ({first.told.name}) and reaches "
                    f"{first.peer} from {first.source_address} ({first.leaves_by.name})",
                ),
                fix=(
                    Fix(
                        node=node,
                        command="sudo sysctl -w net.ipv4.conf.all.rp_filter=2 "
                        f"net.ipv4.conf.{first.told.name}.rp_filter=2",
                        owner="admin",
                    ),
                ),
                would="works or hangs for more than 30 min, by which node has the higher address: "
                "the dial of the others is dropped, its own is not",
                confidence="likely",
            )
