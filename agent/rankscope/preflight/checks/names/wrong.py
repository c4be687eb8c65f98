"""dns.wrong: a name that leads to somebody else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.names.answers import (
    Answer,
    answers,
    best_address,
    hosts_fix,
    hosts_line,
    own_addresses,
)
from rankscope.preflight.checks.pairs import is_loopback, ordered, owners, shortened
from rankscope.preflight.model import Finding, Scope, Status, Tier

Wrong = tuple[Answer, str]


class DnsWrong:
    """The address that a node gets for a peer is one that this peer has."""

    id: ClassVar[str] = "dns.wrong"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Name the nodes with the wrong entry, never the one it is about."""
        owned = owners(run)
        groups: dict[tuple[str, str, Status], list[Wrong]] = defaultdict(list)
        num_right: dict[str, int] = defaultdict(int)
        for answer in answers(run):
            wrong = _wrong(run, answer, owned)
            if wrong is None:
                num_right[answer.target] += 1
                continue
            address, status = wrong
            groups[answer.target, address, status].append((answer, address))
        # one careless copy of /etc/hosts may be wrong about several peers
        merged: dict[tuple[tuple[str, ...], Status], list[Wrong]] = defaultdict(list)
        for (_, _, status), some in groups.items():
            merged[tuple(sorted({answer.holder for answer, _ in some})), status] += some
        for (holders, status), some in merged.items():
            is_shared = len(holders) > 1 and not any(num_right[a.target] for a, _ in some)
            from_server = all(hosts_line(run, *one) is None for one in some)
            blamed = () if is_shared and from_server else ordered(run, holders)
            yield self._finding(run, status, some, blamed, owned)

    def _finding(
        self, run: Run, status: Status, some: list[Wrong], blamed: tuple[str, ...],
        owned: Mapping[str, frozenset[str]],
    ) -> Finding:  # fmt: skip
        answer, address = some[0]
        whose = listed(sorted(owned.get(address, frozenset()))) or "none of the nodes"
        who = f"on {listed(blamed)}" if blamed else "for every node"
        names = list(dict.fromkeys(one.name for one, _ in some))
        what = f"the name {answer.name} is {address}, which {whose} has"
        if len(names) > 1:
            what = f"the names {listed(names)} have wrong addresses"
        told = []
        for one, wrong in some:
            line = hosts_line(run, one, wrong)
            where = f'line {line.number} of /etc/hosts: "{line.text}"' if line else "a name server"
            right = ", ".join(own_addresses(run, one.target)) or "not known"
            told.append(f"{one.holder}: {one.name} is {wrong} ({where}); it has {right}")
            dial = one.dial_of(wrong)
            if dial is not None:
                by = f", answered by {dial.answered_by}" if dial.answered_by else ""
                told.append(f"{one.holder}->{wrong}  {dial.outcome}{by}")
        return Finding(
            id=self.id,
            status=status,
            title=f"{who} {what}",
            nodes=blamed,
            edges=tuple(dict.fromkeys((one.holder, one.target) for one, _ in some)),
            evidence={
                "name": answer.name,
                "wrong_address": address,
                "right_address": best_address(run, answer),
                "is_first": status == "fail",
            },
            told=shortened(told),
            fix=tuple(dict.fromkeys(hosts_fix(run, one, wrong) for one, wrong in some)),
            wrong_if=f"{address} is translated to {answer.target} on the way (NAT)",
        )


def _wrong(
    run: Run, answer: Answer, owned: Mapping[str, frozenset[str]]
) -> tuple[str, Status] | None:
    """Return the wrong address; it fails where no answer is right, and warns where one is."""
    if answer.target not in run.reports:
        # all that is known of it is who answered in its place
        first = answer.dial_of(answer.addresses[0])
        if first is not None and first.outcome == "wrong-host":
            return answer.addresses[0], "fail"
        return None
    right = own_addresses(run, answer.target)
    outside = [a for a in answer.addresses if not is_loopback(a)]
    if not right:
        return None  # nothing to hold it against
    hits = [a for a in outside if a in right]
    if hits or not outside:
        dead = outside[0] if outside and outside[0] not in right else ""
        if not dead or ":" in dead:
            return None  # dns.loopback's matter, or dns.family's
        first = answer.dial_of(dead)
        return (dead, "warn") if first is not None and first.outcome != "ok" else None
    if answer.has_arrived:
        return None  # translated on the way
    return next((a for a in outside if a in owned), outside[0]), "fail"
