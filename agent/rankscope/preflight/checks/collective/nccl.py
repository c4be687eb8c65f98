"""coll.nccl: all-reduces of rising sizes over NCCL end, sum rightly, and take the fast network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.collective.ends import began, elsewhere, stalls, wrong_sums
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_NO_IB = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")  # what may keep NCCL from InfiniBand


class CollNccl:
    """All-reduces over NCCL end, sum rightly, and use InfiniBand where there is some."""

    id: ClassVar[str] = "coll.nccl"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "smoke", "gpu"})

    def judge(self, run: Run) -> Iterable[Finding]:
        """Return wrong sums, collectives that did not end, and who fell back to TCP."""
        if other := elsewhere(run, self.id, "nccl"):
            return [other]
        return [*wrong_sums(run, self.id), *stalls(run, self.id), *self._fell_back(run)]

    def _fell_back(self, run: Run) -> Iterator[Finding]:
        ports = {r.node: r.facts.rdma.ports for r in run.present if r.facts.rdma is not None}
        nodes = tuple(
            node
            for node, smoke in began(run).items()
            if smoke.nccl_net == "Socket" and ports.get(node)
        )
        if not nodes:
            return
        yield Finding(
            id=self.id,
            status="warn",
            title=f"NCCL uses TCP sockets on {', '.join(nodes)} though there is InfiniBand",
            nodes=nodes,
            evidence={"num_rdma_ports": {node: len(ports[node]) for node in nodes}},
            told=tuple(f'{node}: NCCL says "NET/Socket"' for node in nodes),
            fix=tuple(Fix(node=node, command=_remedy(run, node)) for node in nodes),
            would="training runs, and its communication is held to the speed of TCP over Ethernet",
            wrong_if="these InfiniBand ports are for storage, and NCCL is kept off them on purpose",
        )


def _remedy(run: Run, node: str) -> str:
    launch = run.launches.get(node)
    known = [name for name in _NO_IB if launch is not None and name in launch.environment]
    if known:
        return f"unset {' '.join(known)}"
    return "ls -l /dev/infiniband; ldconfig -p | grep libibverbs  # both must be there"
