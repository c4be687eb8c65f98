"""dns.family: IPv4 and IPv6."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.names.answers import Answer, answers, hosts_fix, own_addresses
from rankscope.preflight.checks.pairs import CLOSED, ordered, shortened
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier


class DnsFamily:
    """The first address of a name works, and all nodes share IPv4 or IPv6."""

    id: ClassVar[str] = "dns.family"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Look at dead IPv6 answers, then for nodes without a common family."""
        yield from self._dead_first(run)
        yield from self._apart(run)

    def _dead_first(self, run: Run) -> Iterator[Finding]:
        groups: dict[tuple[str, Status], list[Answer]] = defaultdict(list)
        for answer in answers(run):
            first = answer.addresses[0]
            dial = answer.dial_of(first)
            if ":" not in first or dial is None or dial.outcome not in CLOSED:
                continue
            right = own_addresses(run, answer.target)
            if answer.has_arrived:
                groups[answer.target, "warn"].append(answer)
            elif first in right and not any(a in right for a in answer.addresses if ":" not in a):
                groups[answer.target, "fail"].append(answer)
        for (target, status), some in groups.items():
            holders = ordered(run, {answer.holder for answer in some})
            one = some[0]
            later = "a later one works" if status == "warn" else "there is no other"
            told = []
            for answer in some:
                dial = answer.dial_of(answer.addresses[0])
                how = dial.outcome if dial is not None else "not tried"
                told.append(f"{answer.holder}: {' '.join(answer.addresses)}; the first: {how}")
            fixes = [hosts_fix(run, answer, answer.addresses[0]) for answer in some]
            order = "echo 'precedence ::ffff:0:0/96 100' | sudo tee -a /etc/gai.conf"
            fixes.append(Fix(node=holders[0] if len(holders) == 1 else "", command=order,
                             owner="admin"))  # fmt: skip
            yield Finding(
                id=self.id,
                status=status,
                title=f"on {listed(holders)} the first address of {one.name}, {one.addresses[0]}, "
                f"is dead; {later}",
                nodes=holders,
                edges=tuple(dict.fromkeys((a.holder, target) for a in some)),
                evidence={"addresses": list(one.addresses)},
                told=shortened(told),
                fix=tuple(dict.fromkeys(fixes)),
                wrong_if="the job asks for IPv4 alone",
            )

    def _apart(self, run: Run) -> Iterator[Finding]:
        families = {
            report.node: frozenset(6 if ":" in one else 4 for one in own)
            for report in run.present
            if (own := own_addresses(run, report.node))
        }
        only_6 = ordered(run, {node for node, some in families.items() if some == {6}})
        only_4 = ordered(run, {node for node, some in families.items() if some == {4}})
        if not only_6 or len(only_6) == len(families):
            return
        told = [f"IPv6 alone: {listed(only_6)}"]
        if only_4:
            told.append(f"IPv4 alone: {listed(only_4)}")
        yield Finding(
            id=self.id,
            status="fail" if only_4 else "warn",
            title=f"{listed(only_6)}: no IPv4 address, others have one"
            + ("" if only_4 else "; IPv6 is all that they share"),
            nodes=only_6,
            evidence={"only_ipv6": list(only_6), "only_ipv4": list(only_4)},
            told=tuple(told),
            fix=tuple(
                Fix(node=node, command="ip -4 -br address  # give it an IPv4 address",
                    owner="admin")
                for node in only_6[:4]
            ) if only_4 else (Fix(command="export NCCL_SOCKET_FAMILY=AF_INET6"),),
            wrong_if="the missing addresses are on an interface that this process does not see",
        )  # fmt: skip
