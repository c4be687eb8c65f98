"""dns.self.loopback: a node's own name is an address that others can reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.facts.interfaces import Choice
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Tier


class DnsSelfLoopback:
    """The own host name resolves to an address of this machine, not to 127.x.

    gloo tells the others the address that its host name resolves to. Distributions write
    "127.0.1.1 NAME" into /etc/hosts, and then each node tells the others to call themselves.
    """

    id: ClassVar[str] = "dns.self.loopback"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail with gloo, warn with NCCL alone; GLOO_SOCKET_IFNAME heals it."""
        yield from not_measured(self.id, run, "interfaces")
        trapped = {r.node: c for r in run.present if (c := loopback_by_name(r)) is not None}
        if not trapped:
            return
        nodes = tuple(trapped)
        told = [line for node in nodes[:4] for line in _told(run, node, trapped[node])]
        yield Finding(
            id=self.id,
            status="fail" if run.backend == "gloo" else "warn",
            nodes=nodes,
            title=f"{listed(nodes)}: the own host name means {_meaning(run, trapped)}, "
            "which gloo tells the others",
            evidence={node: _evidence(run, node, choice) for node, choice in trapped.items()},
            told=tuple(told),
            fix=tuple(fix for node in nodes for fix in _fixes(run, node)),
            would=_would(run, nodes),
            wrong_if="the job never uses gloo" if run.backend != "gloo" else "",
        )


def loopback_by_name(report: NodeReport) -> Choice | None:
    """Return gloo's choice on a node where its host name makes it take loopback; else None."""
    facts, smoke = report.facts.interfaces, report.facts.smoke
    if facts is None or not facts.gloo or facts.gloo[0].how.startswith("GLOO_SOCKET_IFNAME"):
        return None
    truth = smoke.gloo[0] if smoke is not None and smoke.gloo else None
    choice = truth if truth is not None and truth.address else facts.gloo[0]
    return facts.gloo[0] if choice.address and is_local(choice.address) else None


def _meaning(run: Run, trapped: dict[str, Choice]) -> str:
    addresses = sorted({choice.address for choice in trapped.values()})
    if all(choice.problem for choice in trapped.values()):
        return "nothing: gloo falls back to 127.0.0.1"
    return " or ".join(addresses)


def _evidence(run: Run, node: str, choice: Choice) -> dict[str, object]:
    names = run.reports[node].facts.names
    own = names.own if names is not None else None
    return {
        "advertised_address": choice.address,
        "resolved_addresses": list(own.addresses) if own is not None else [],
        "resolver_error": own.error if own is not None else "",
    }


def _told(run: Run, node: str, choice: Choice) -> Iterator[str]:
    names = run.reports[node].facts.names
    yield f"{node}: {choice.problem or choice.how}"
    for line in names.hosts_lines if names is not None else ():
        words = line.text.split()
        if is_local(words[0]) and names is not None and names.hostname in words[1:]:
            yield f"{node}: /etc/hosts line {line.number}: {line.text}"


def _fixes(run: Run, node: str) -> Iterator[Fix]:
    """Yield the repair of the names file, and the way around it that needs no right."""
    report = run.reports[node]
    names, interfaces = report.facts.names, report.facts.interfaces
    address, interface = "", ""
    for row in interfaces.interfaces if interfaces is not None else ():
        for text in row.addresses:
            bare = text.partition("/")[0]
            if not address and bare in report.addresses and not row.kind and row.is_up:
                address, interface = bare, row.name
    if interface:
        yield Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={interface}")
    if names is None or not address:
        return
    commands = []
    for line in names.hosts_lines:
        words = line.text.split()
        if is_local(words[0]) and names.hostname in words[1:]:
            edit = f"{line.number}s/[[:space:]]{names.hostname}\\b//"
            if words[1:] == [names.hostname]:
                edit = f"{line.number}s/^/# /"
            commands.append(f"sudo sed -i '{edit}' /etc/hosts")
    commands.append(f"echo '{address} {names.hostname}' | sudo tee -a /etc/hosts")
    yield Fix(node=node, command=" && ".join(commands), owner="admin")


def _would(run: Run, nodes: tuple[str, ...]) -> str:
    """gloo's higher address dials the lower one: a single 127.x above all others passes by luck."""
    others = [run.gloo_address(r.node) for r in run.present if r.node not in nodes]
    is_lower = [_first(address) < 127 for address in others if _first(address) >= 0]
    if len(nodes) == 1 and others and len(is_lower) == len(others) and all(is_lower):
        return (
            "works today with gloo, by luck: the higher address dials, and 127.x is higher than "
            "all others here; fails when the addresses lie above 127, or a second node does this"
        )
    return (
        "gloo init: the others dial their own loopback: 'Connection refused, remote=[127...]' "
        "after 5 to 30 s on some ranks, the rest hang for more than 30 min"
    )


def _first(address: str) -> int:
    head = address.partition(".")[0]
    return int(head) if head.isdigit() else -1
