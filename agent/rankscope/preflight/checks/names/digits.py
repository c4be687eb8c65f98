"""dns.digits: no host is called by a number."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_NUMBER = r"(?:0[xX][0-9a-fA-F]+|[0-9]+)"


class DnsDigits:
    """No host name is a number, which the resolver takes for an IPv4 address.

    getaddrinfo reads "1234" as 0.0.4.210 before it asks /etc/hosts or DNS, so that a host of this
    name can never be reached by it.
    """

    id: ClassVar[str] = "dns.digits"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on such a master or peer, and on such an own name."""
        uses: dict[str, list[str]] = {}
        for report in run.present:
            launch, names = report.facts.launch, report.facts.names
            if launch is not None and launch.master_addr:
                uses.setdefault(launch.master_addr, []).append(f"MASTER_ADDR on {report.node}")
            if names is not None:
                uses.setdefault(names.hostname, []).append(f"own name of {report.node}")
        for name in run.expected:
            uses.setdefault(name, []).append("name of a node")
        for name, where in uses.items():
            address = read_as_address(name)
            if address:
                yield self._finding(run, name, address, where)

    def _finding(self, run: Run, name: str, address: str, where: list[str]) -> Finding:
        owners = [
            r.node for r in run.present
            if r.node == name or (r.facts.names is not None and r.facts.names.hostname == name)
        ]  # fmt: skip
        real = next((a for n in owners for a in run.reports[n].addresses), "")
        fix = [Fix(node=n, command=f"sudo hostnamectl set-hostname node{name}", owner="admin")
               for n in owners]  # fmt: skip
        if real:
            fix.insert(0, Fix(command=f"export MASTER_ADDR={real}"))
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(owners),
            title=f"the host name {name} is a number: the resolver reads it as {address}",
            evidence={"name": name, "read_as": address, "used_as": where},
            told=tuple(where[:4]),
            fix=tuple(fix),
            would="gloo and the store dial another address: time-outs after 15 to 30 min",
        )


def read_as_address(name: str) -> str:
    """Return the IPv4 address that getaddrinfo reads in `name`; "" if it is a name, or plain."""
    if not re.fullmatch(rf"{_NUMBER}(?:\.{_NUMBER}){{0,3}}", name):
        return ""
    try:
        address = socket.inet_ntoa(socket.inet_aton(name))
    except OSError:
        return ""  # too large a number: it is looked up as a name
    return "" if address == name else address
