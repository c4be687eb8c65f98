"""host.dup: every agent runs on a machine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier


class HostDup:
    """No two nodes are the same machine, and no two have the same host name.

    NCCL takes ranks with the same host name and boot id for neighbours that share memory;
    torchrun lets every node that is called like the endpoint host the store.
    """

    id: ClassVar[str] = "host.dup"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on two agents in one place; warn on one name for two machines."""
        yield from not_measured(self.id, run, "host")
        hosts = {r.node: r.facts.host for r in run.present if r.facts.host is not None}
        places = {
            node: (host.boot_id, host.network_namespace)
            for node, host in hosts.items()
            if host.boot_id and host.network_namespace
        }
        seen: set[str] = set()
        for nodes in by_value(places).values():
            if len(nodes) > 1:
                seen.update(nodes)
                yield self._same_place(run, nodes)
        named = {node: host.hostname for node, host in hosts.items() if host.hostname}
        for name, nodes in by_value(named).items():
            if len(nodes) > 1 and not seen.issuperset(nodes):
                boots = {hosts[node].boot_id for node in nodes}
                yield self._same_name(run, name, nodes, len(boots) < len(nodes))

    def _same_place(self, run: Run, nodes: tuple[str, ...]) -> Finding:
        hosts = [run.reports[node].facts.host for node in nodes]
        name = next((host.hostname for host in hosts if host is not None), "")
        return Finding(
            id=self.id,
            status="fail",
            nodes=nodes,
            title=f"{listed(nodes)} are the same machine ({name}): two agents on one host",
            evidence={
                node: {"boot_id": host.boot_id, "network_namespace": host.network_namespace}
                for node, host in zip(nodes, hosts, strict=True)
                if host is not None
            },
            told=("start one agent on each machine: check the list of nodes",),
            would="both launchers want the same port and the same GPUs, and one machine is idle",
            wrong_if="two launchers on one machine are meant",
        )

    def _same_name(
        self, run: Run, name: str, nodes: tuple[str, ...], is_same_boot: bool
    ) -> Finding:
        masters = {launch.master_addr for launch in run.launches.values()}
        hosts_store = run.mode == "c10d" and name in masters
        shares_memory = run.backend == "nccl" and is_same_boot
        status: Status = "fail" if hosts_store or shares_memory else "warn"
        would = "names in logs and reports are mixed up"
        if hosts_store:
            would = "each of them hosts a store of its own: RendezvousTimeoutError after 10 min"
        elif shares_memory:
            would = "NCCL takes them for one machine and tries shared memory: init fails"
        return Finding(
            id=self.id,
            status=status,
            nodes=nodes,
            title=f"{listed(nodes)} are all called {name}",
            evidence={"hostname": name, "nodes": list(nodes)},
            told=tuple(f"{n}: {', '.join(run.reports[n].addresses[:3])}" for n in nodes[:4]),
            fix=tuple(
                Fix(node=n, command=f"sudo hostnamectl set-hostname {name}-{i}", owner="admin")
                for i, n in enumerate(nodes)
            ),
            would=would,
        )
