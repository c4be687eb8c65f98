"""Interfaces that are down, and one hardware address on two nodes."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.commands import word
from rankscope.preflight.checks.ways import interfaces_of, near_interface, ways
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.model import CheckFinding, Fix


class NetDown(BuiltinCheck, id="net.down", needs=("peers",)):
    """The interface that the job uses is switched on and has a link."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on an interface that is down: nothing comes in or goes out there."""
        yield from self.not_measured(run, "interfaces")
        used = {r.node: row for r in run.present if (row := _used(run, r.node)) is not None}
        dead = {node: row for node, row in used.items() if _why(row)}
        causes = grouped(((row.name, _why(row)), node) for node, row in dead.items())
        for (name, why), nodes in causes.items():
            yield self.fail(
                f"{name}, which the job uses, {why}",
                at=nodes,
                evidence={"interface": name, "is_up": dead[nodes[0]].is_up,
                          "has_carrier": dead[nodes[0]].has_carrier},
                lines=(f"{n}: {name} has {', '.join(dead[n].addresses)}" for n in nodes[:4]),
                fix=on_each(nodes, _raise(dead[nodes[0]]), "admin"),
                impact="no connection to or from that node",
            )  # fmt: skip


def _why(row: Interface) -> str:
    if not row.is_up:
        return "is down"
    return "has no link" if row.has_carrier is False else ""


def _raise(row: Interface) -> str:
    if not row.is_up:
        return f"sudo ip link set dev {word(row.name)} up"
    return f"# {row.name} is switched on and has no link: see to its cable and the switch's port"


def _used(run: Run, node: str) -> Interface | None:
    """Return the interface of the address that the job advertises."""
    facts = run.reports[node].facts.interfaces
    chosen = [run.gloo_address(node)]
    if facts is not None and run.backend == "nccl" and facts.nccl:
        chosen.insert(0, facts.nccl[0].address)
    rows = interfaces_of(run, node)
    for address in filter(None, chosen):
        for row in rows:
            if address in [text.partition("/")[0] for text in row.addresses]:
                return None if row.is_loopback or row.kind else row
    named = facts.gloo[0].interface if facts is not None and facts.gloo else ""
    return next((r for r in rows if r.name == named and not r.is_up and not r.is_loopback), None)


class NetLoopback(BuiltinCheck, id="net.loopback"):
    """The loopback interface is up: what a machine sends to its own addresses passes there."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where ranks of one node talk, or rank 0 opens its store; else warn."""
        yield from self.not_measured(run, "interfaces")
        down = [
            report.node
            for report in run.present
            if any(row.is_loopback and not row.is_up for row in interfaces_of(run, report.node))
        ]
        needed = grouped((_needs_loopback(run, node), node) for node in down)
        for is_needed, nodes in needed.items():
            yield self.finding(
                "fail" if is_needed else "warn",
                "lo is down",
                at=nodes,
                evidence={"nproc": {node: run.nproc(node) for node in nodes}},
                fix=on_each(nodes, "sudo ip link set dev lo up", "admin"),
                impact="a node cannot connect to its own addresses: rank 0 does not reach its own "
                "store, and ranks of one node not each other"
                if is_needed
                else "works with one rank on that node; its own ranks could not reach each other",
            )


def _needs_loopback(run: Run, node: str) -> bool:
    return node == run.master or run.nproc(node) > 1 or run.backend == "nccl"


class NetDupMac(BuiltinCheck, id="net.dup_mac", scope="all", needs=("peers",)):
    """No two nodes of one network have the same MAC address."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where such nodes do not reach each other: the switch sends frames to one of them."""
        yield from self.not_measured(run, "interfaces")
        used = {r.node: row for r in run.present if (row := _used(run, r.node)) is not None}
        by_mac = grouped((row.mac, node) for node, row in used.items() if row.mac.strip("0:"))
        lost = ways(run).closed if any(len(nodes) > 1 for nodes in by_mac.values()) else {}
        for mac, nodes in by_mac.items():
            twins = [node for node in nodes if _is_near(run, nodes[0], node, used)]
            edges = tuple(path for path in lost if path[0] in twins or path[1] in twins)
            if len(twins) < 2 or not edges:
                continue
            yield self.fail(
                f"{listed(twins)} have the same MAC address {mac}",
                nodes=twins,
                edges=edges,
                evidence={"mac": mac, "interfaces": {node: used[node].name for node in twins}},
                lines=(f"{node}: {used[node].name}  {mac}" for node in twins[:4]),
                fix=(
                    Fix(
                        node=node,
                        command=f"# give {used[node].name} a MAC address of its own, in the "
                        "settings of the virtual machine or of the network",
                        owner="admin",
                    )
                    for node in twins[1:]
                ),
                impact="the switch sends what is for one of them to the other: hangs of 30 min",
            )


def _is_near(run: Run, node: str, other: str, used: dict[str, Interface]) -> bool:
    address = run.gloo_address(other)
    near = near_interface(run, node, address) if address else None
    return node == other or (near is not None and near.name == used[node].name)
