"""dns.loopback: a peer's name that means this very node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.names.answers import Answer, answers, hosts_fix, hosts_line
from rankscope.preflight.checks.pairs import is_loopback, ordered, shortened
from rankscope.preflight.model import Finding, Scope, Status, Tier


class DnsLoopback:
    """No peer's name leads back to the node that asks.

    Installers write `127.0.1.1 NAME` into /etc/hosts; a copied file does that for another node.
    """

    id: ClassVar[str] = "dns.loopback"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the first answer is loopback, warn where a later one is."""
        groups: dict[tuple[str, Status], list[tuple[Answer, str]]] = defaultdict(list)
        for answer in answers(run):
            address = next((one for one in answer.addresses if is_loopback(one)), "")
            if address and answer.holder != answer.target:
                status: Status = "fail" if address == answer.addresses[0] else "warn"
                groups[answer.target, status].append((answer, address))
        for (target, status), some in groups.items():
            holders = ordered(run, {answer.holder for answer, _ in some})
            told = []
            for answer, address in some:
                line = hosts_line(run, answer, address)
                where = f'line {line.number} of /etc/hosts: "{line.text}"' if line else "a resolver"
                told.append(f"{answer.holder}: {answer.name} is {address}, says {where}")
            yield Finding(
                id=self.id,
                status=status,
                title=f"on {listed(holders)} the name {some[0][0].name} is {some[0][1]}: loopback",
                nodes=holders,
                edges=tuple(dict.fromkeys((answer.holder, target) for answer, _ in some)),
                evidence={"addresses": {a.holder: list(a.addresses) for a, _ in some}},
                told=shortened(told),
                fix=tuple(
                    dict.fromkeys(hosts_fix(run, answer, address) for answer, address in some)
                ),
                wrong_if="the job names its nodes by address and never by name",
            )
