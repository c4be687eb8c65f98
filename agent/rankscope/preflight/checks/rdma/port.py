"""ib.port: links that are down, or slower than the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.checks.rdma.chosen import chosen
from rankscope.preflight.facts.rdma import RdmaPort
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class IbPort:
    """The RDMA ports of every node are up, as many and as fast as on the other nodes.

    A port that is down on all nodes is one that nobody has cabled.
    """

    id: ClassVar[str] = "ib.port"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"rdma"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where a port is down or slow that is up or fast on most nodes."""
        yield from not_measured(self.id, run, "rdma")
        ports: dict[str, dict[str, RdmaPort]] = {}
        for report in run.present:
            if report.facts.rdma is not None:
                ports[report.node] = {port.name: port for port in chosen(report.facts.rdma)}
        names = sorted({name for told in ports.values() for name in told})
        down = _down(ports, names)
        slow = _slow(ports, names)
        yield from self._finding(ports, down, "is not up")
        yield from self._finding(ports, slow, "is slower than on the other nodes")
        if not down and not slow:
            yield from _counts(ports)

    def _finding(
        self, ports: dict[str, dict[str, RdmaPort]], bad: dict[str, list[str]], words: str
    ) -> Iterator[Finding]:
        if not bad:
            return
        told = {
            node: [f"{name} {_words(ports[node].get(name))}" for name in names]
            for node, names in bad.items()
        }
        node = next(iter(bad))
        yield Finding(
            id=self.id,
            status="fail",
            nodes=tuple(bad),
            title=f"{listed(bad)}: {told[node][0]}: it {words}",
            evidence={"ports": told},
            told=tuple(f"{node}: {text}" for node, texts in told.items() for text in texts)[:16],
            fix=tuple(
                Fix(
                    node=node,
                    command=f"ibstat {names[0].partition(':')[0]}; sudo ibdiagnet -r | tail"
                    "   # cable, transceiver, switch port",
                    owner="admin",
                )
                for node, names in bad.items()
            ),
            would="NCCL leaves the port out: less bandwidth on this node, or 'no route' at init",
            wrong_if="the port is meant to be unused: then name the others in NCCL_IB_HCA",
        )


def _down(ports: dict[str, dict[str, RdmaPort]], names: list[str]) -> dict[str, list[str]]:
    """Return ports that are up on most nodes, and those that wait for a subnet manager."""
    bad: dict[str, list[str]] = {}
    for name in names:
        states = {node: told[name].state for node, told in ports.items() if name in told}
        up = [node for node, state in states.items() if state == "ACTIVE"]
        for node, state in states.items():
            is_half_up = state in ("INIT", "ARMED")  # cabled, and no subnet manager answers
            if state != "ACTIVE" and (2 * len(up) >= len(states) or is_half_up):
                bad.setdefault(node, []).append(name)
    return bad


def _slow(ports: dict[str, dict[str, RdmaPort]], names: list[str]) -> dict[str, list[str]]:
    bad: dict[str, list[str]] = {}
    for name in names:
        rates = {
            node: told[name].rate_gbit
            for node, told in ports.items()
            if name in told and told[name].state == "ACTIVE" and told[name].rate_gbit
        }
        odd = odd_ones(rates)
        usual = [rate for node, rate in rates.items() if node not in odd]
        for node in odd:
            if usual and rates[node] < usual[0]:
                bad.setdefault(node, []).append(name)
    return bad


def _counts(ports: dict[str, dict[str, RdmaPort]]) -> Iterator[Finding]:
    """Tell where a node has fewer active ports, or ports of another kind."""
    for what, ask in (
        ("active RDMA ports", lambda told: sum(port.state == "ACTIVE" for port in told)),
        ("link layer", lambda told: ", ".join(sorted({p.link_layer for p in told})) or "none"),
    ):
        values: dict[str, object] = {node: ask(told.values()) for node, told in ports.items()}
        odd = odd_ones(values)
        if odd and 2 * len(odd) < len(values):
            yield Finding(
                id=IbPort.id,
                status="fail",
                nodes=odd,
                title=f"{listed(odd)}: {what}: {values[odd[0]]}, not as on the other nodes",
                evidence={what: values},
                told=compared(values),
                fix=tuple(
                    Fix(node=node, command="ibstat; lspci | grep -i mellanox") for node in odd
                ),
                would="NCCL uses fewer ports on this node: all wait for it, or init fails",
                wrong_if="the nodes are of different make",
            )
            return


def _words(port: RdmaPort | None) -> str:
    if port is None:
        return "is absent"
    return f"{port.state or 'in unknown state'}/{port.phys_state or '?'}, {port.rate or 'no rate'}"
