"""What nodes think their peers' names mean, and how a wrong entry is repaired."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.names import HostsLine
from rankscope.preflight.model import Fix


@dataclass(frozen=True)
class Answer:
    """The addresses that `holder` gets for the name of `target`, in the resolver's order."""

    holder: str
    target: str
    name: str
    addresses: tuple[str, ...]
    edge: EdgeFacts

    def dial_of(self, address: str) -> Dial | None:
        """Return how the call to `address` ended; None if it was not tried."""
        dials = (self.edge.mesh, *self.edge.others, self.edge.master)
        return next((d for d in dials if d is not None and d.address == address), None)

    @property
    def has_arrived(self) -> bool:
        """Return whether a call by this name has reached the target's agent."""
        dials = [self.dial_of(address) for address in self.addresses]
        return any(dial is not None and dial.outcome == "ok" for dial in dials)


def answers(run: Run) -> Iterator[Answer]:
    """Yield what each node gets for each peer, and for MASTER_ADDR where that is another name."""
    for start, end, edge in run.edges():
        if edge.resolved is not None and edge.resolved.addresses:
            yield Answer(start, end, edge.resolved.name, edge.resolved.addresses, edge)
    for report in run.present:
        names = report.facts.names
        asked = names.master if names is not None else None
        edge_to_master = report.edges.get(run.master)
        if asked is None or edge_to_master is None or not asked.addresses:
            continue
        told = edge_to_master.resolved
        if not _is_address(asked.name) and (told is None or told.name != asked.name):
            yield Answer(report.node, run.master, asked.name, asked.addresses, edge_to_master)


def own_addresses(run: Run, node: str) -> tuple[str, ...]:
    """Return the addresses of a node that others could reach: none of a single link."""
    report = run.reports.get(node)
    addresses = report.addresses if report is not None else ()
    return tuple(one for one in addresses if not one.lower().startswith("fe80:"))


def hosts_line(run: Run, answer: Answer, address: str) -> HostsLine | None:
    """Return the line of the holder's /etc/hosts that says so; None: it came from elsewhere."""
    names = run.reports[answer.holder].facts.names
    for line in names.hosts_lines if names is not None else ():
        words = line.text.partition("#")[0].split()
        if words[:1] == [address] and answer.name in words[1:]:
            return line
    return None


def hosts_fix(run: Run, answer: Answer, address: str) -> Fix:
    """Return what puts the target's real address where `address` stands on the holder."""
    right = best_address(run, answer)
    line = hosts_line(run, answer, address)
    wanted = f"{right} {answer.name}" if right else ""
    if line is None:
        command = f"getent ahosts {answer.name}  # comes from a name server: mend the entry there"
        return Fix(node=answer.holder, command=command, owner="admin")
    words = line.text.partition("#")[0].split()
    if len(words) == 2:
        edit = f"{line.number}s/.*/{wanted}/" if wanted else f"{line.number}d"
    else:
        name = answer.name.replace(".", r"\.")
        edit = f"{line.number}s/[[:space:]]{name}\\b//" + (f"; $a{wanted}" if wanted else "")
    # /etc/hosts is often a mount, which `sed -i` cannot replace: it is written in place
    command = f"sudo cp /etc/hosts /etc/hosts.old && sed '{edit}' /etc/hosts.old"
    return Fix(node=answer.holder, command=f"{command} | sudo tee /etc/hosts", owner="admin")


def best_address(run: Run, answer: Answer) -> str:
    """Return the address of the target that belongs into the entry."""
    owned = own_addresses(run, answer.target)
    chosen = run.gloo_address(answer.target)
    if chosen in owned:
        return chosen
    return next((one for one in owned if ":" not in one), next(iter(owned), ""))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
