"""ib.gid: the entry of the address table that NCCL will use on RoCE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.checks.rdma.chosen import chosen
from rankscope.preflight.facts.rdma import Gid, RdmaPort
from rankscope.preflight.model import Finding, Fix, Scope, Tier

V2 = "RoCE v2"


class IbGid:
    """On RoCE, NCCL_IB_GID_INDEX names an entry that exists and is RoCE v2 on all nodes.

    Without the variable NCCL since 2.21 looks for one itself.
    """

    id: ClassVar[str] = "ib.gid"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"rdma"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the entry is absent, of another kind, or no RoCE v2 entry exists."""
        yield from not_measured(self.id, run, "rdma")
        kinds: dict[str, str] = {}
        bad: dict[str, dict[str, str]] = {}
        good: dict[str, int] = {}
        for report in run.present:
            rdma = report.facts.rdma
            if rdma is None:
                continue
            for port in chosen(rdma):
                if port.link_layer != "Ethernet" or port.state != "ACTIVE":
                    continue
                what, kind = _judged(port, rdma.gid_index)
                good[report.node] = next((g.index for g in port.gids if _is_v2(g)), -1)
                if what:
                    bad.setdefault(what, {})[report.node] = port.name
                elif kind:
                    kinds[report.node] = kind
        if not kinds and not bad:
            yield Finding(id=self.id, status="skipped", title="no active RoCE port")
            return
        for what, nodes in bad.items():
            yield self._finding(what, nodes, good)
        odd = odd_ones(kinds)
        if odd and not bad:
            yield Finding(
                id=self.id,
                status="fail",
                nodes=odd,
                title=f"{listed(odd)}: {kinds[odd[0]]}, not as on the other nodes",
                evidence={"kinds": kinds},
                told=compared(kinds),
                fix=tuple(
                    Fix(node=node, command=f"export NCCL_IB_GID_INDEX={good[node]}") for node in odd
                ),
                would="queue pairs between these nodes fail: NCCL 'ibv_modify_qp failed'",
                wrong_if="the launcher sets NCCL_IB_GID_INDEX for each node",
            )

    def _finding(self, what: str, nodes: dict[str, str], good: dict[str, int]) -> Finding:
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: {next(iter(nodes.values()))}: {what}",
            evidence={"ports": nodes, "index_of_v2": {node: good[node] for node in nodes}},
            told=tuple(f"{node}: {port}: {what}" for node, port in nodes.items()),
            fix=tuple(
                Fix(node=node, command=f"export NCCL_IB_GID_INDEX={good[node]}")
                if good[node] >= 0
                else Fix(
                    node=node,
                    command="show_gids   # give the interface an IPv4 address",
                    owner="admin",
                )
                for node in nodes
            ),
            would="NCCL cannot connect over RoCE: 'ibv_modify_qp failed', or dropped packets",
            wrong_if="the launcher sets NCCL_IB_GID_INDEX for each node",
        )


def _is_v2(gid: Gid) -> bool:
    return gid.kind == V2 and gid.gid.startswith("0000:0000:0000:0000:0000:ffff")


def _judged(port: RdmaPort, index: int | None) -> tuple[str, str]:
    """Return what is wrong, or else the kind of the entry that will be used."""
    if index is None or index < 0:
        kinds = {gid.kind for gid in port.gids}
        if V2 not in kinds:
            return f"no address of the kind {V2}", ""
        return "", V2
    entry = next((gid for gid in port.gids if gid.index == index), None)
    if entry is None:
        return f"NCCL_IB_GID_INDEX={index} names no address", ""
    if entry.kind != V2:
        return f"NCCL_IB_GID_INDEX={index} is {entry.kind or 'of unknown kind'}, not {V2}", ""
    return "", entry.kind
