"""env.rank.unique: no two nodes have the same number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, listed
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_WOULD: dict[Mode, str] = {
    "static": "the store waits 15 min for the number that nobody has: "
    "'keys: .../assigned_ranks/N', then all nodes end",
    "c10d": "nothing: this rendezvous numbers the nodes itself",
    "env": "init_process_group waits 30 min for the rank that nobody has",
}


class EnvRankUnique:
    """Nodes and ranks are numbered from 0 without doubles and gaps."""

    id: ClassVar[str] = "env.rank.unique"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a number that two nodes have, or that lies beyond the number of nodes."""
        if run.mode == "c10d":
            title = "a c10d rendezvous numbers the nodes itself"
            yield Finding(id=self.id, status="skipped", title=title)
            return
        # a number of the node may follow from RANK: then RANK is the cause
        own = {n: x.rank for n, x in run.launches.items() if x.rank is not None}
        ranks = {n: x.node_rank for n, x in run.launches.items() if x.node_rank is not None}
        kind, doubled = "RANK", _doubles(own)
        if not doubled:
            kind, doubled = "node rank", _doubles(ranks)
        for number, nodes in doubled.items():
            yield self._doubled(run, kind, number, nodes)
        told = [x.num_nodes for x in run.launches.values() if x.num_nodes is not None]
        limit = max(told, default=len(run.expected))  # where they differ: that is env.agree's
        high = {node: number for node, number in ranks.items() if not 0 <= number < limit}
        if high and not doubled:
            yield self._beyond(run, high, limit)

    def _doubled(self, run: Run, kind: str, number: int, nodes: tuple[str, ...]) -> Finding:
        has_same_default = (
            kind == "node rank"
            and run.mode == "static"
            and all(
                not {"--node-rank", "PET_NODE_RANK", "GROUP_RANK", "NODE_RANK"}
                & set(run.launches[node].read_from)
                for node in nodes
            )
        )
        why = " (torchrun takes 0 where --node-rank is not given)" if has_same_default else ""
        return Finding(
            id=self.id,
            status="fail",
            nodes=nodes,
            title=f"{listed(nodes)} all say {kind} {number}{why}"
            if len(nodes) > 2
            else f"{nodes[0]} and {nodes[1]} both say {kind} {number}{why}",
            evidence={kind.replace(" ", "_").lower(): number, "nodes": list(nodes)},
            told=tuple(f"{node}: {kind} {number}" for node in nodes[:4]),
            fix=tuple(_numbered(run, kind, nodes)),
            would=_WOULD[run.mode],
        )

    def _beyond(self, run: Run, high: dict[str, int], limit: int) -> Finding:
        said = ", ".join(f"{node} says {n} of {limit}" for node, n in list(high.items())[:4])
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(high),
            title=f"node ranks are counted from 0: {said}",
            evidence={"node_ranks": high},
            fix=tuple(_numbered(run, "node rank", tuple(high))),
            would=_WOULD[run.mode],
        )


def _doubles(numbers: dict[str, int]) -> dict[int, tuple[str, ...]]:
    return {number: nodes for number, nodes in by_value(numbers).items() if len(nodes) > 1}


def _numbered(run: Run, kind: str, nodes: tuple[str, ...]) -> Iterator[Fix]:
    """Yield one command for each node, numbered in the order of the expected nodes."""
    for node in nodes:
        if node not in run.expected:
            continue
        position = run.expected.index(node)
        if kind == "RANK":
            yield Fix(node=node, command=f"export RANK={position * run.nproc(node)}")
        else:
            yield Fix(node=node, command=f"torchrun --node-rank {position} ...")
