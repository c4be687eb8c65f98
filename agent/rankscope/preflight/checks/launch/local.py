"""env.endpoint.local: the endpoint of a job on several nodes is no loopback."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_WOULD: dict[Mode, str] = {
    "static": "every node but the first waits for a store on itself: time-out after 14 min, "
    "the last process ends after 30",
    "c10d": "each node is its own store: RendezvousTimeoutError on all after 10 min",
    "env": "every node but the first waits 30 min for a store on itself",
}


class EnvEndpointLocal:
    """The endpoint is an address of node 0 that the others can reach, not localhost."""

    id: ClassVar[str] = "env.endpoint.local"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a loopback endpoint, except at node 0, which may call itself localhost."""
        local = [n for n, launch in run.launches.items() if is_local(launch.master_addr)]
        culprits = [node for node in local if node != run.master]
        if not culprits:
            return
        nodes = local if len(local) == len(run.launches) else culprits
        said = run.launches[culprits[0]].master_addr
        option = "--rdzv-endpoint" if run.mode == "c10d" else "--master-addr"
        command = f"torchrun {option} {run.master} ..."
        if run.mode == "c10d":
            command = f"torchrun {option} {run.master}:{run.master_port} ..."
        elif run.mode == "env":
            command = f"export MASTER_ADDR={run.master}"
        yield Finding(
            id=self.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: the endpoint is {said}, which is each node itself",
            evidence={node: run.launches[node].master_addr for node in nodes},
            told=(f"{len(run.expected)} nodes are expected to meet there",),
            fix=(Fix(command=command),),
            would=_WOULD[run.mode],
            wrong_if="the script replaces MASTER_ADDR before it meets the others",
        )


def is_local(name: str) -> bool:
    """Return whether a host name or address always means the machine itself."""
    if name.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
