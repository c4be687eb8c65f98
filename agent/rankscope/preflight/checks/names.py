"""Names and addresses: what each name resolves to, on every node."""

from __future__ import annotations

import re
import shlex
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rankscope.preflight.checks.base import (
    BuiltinCheck,
    Run,
    grouped,
    listed,
    on_each,
    worker_host,
)
from rankscope.preflight.checks.commands import quoted, word
from rankscope.preflight.checks.comparing import by_value
from rankscope.preflight.checks.meeting import (
    dial_of,
    is_address,
    is_local,
    meant_by,
    point_to,
    way_to,
)
from rankscope.preflight.checks.pairs import (
    CLOSED,
    interface_towards,
    is_loopback,
    ordered,
    owners,
    shortened,
)
from rankscope.preflight.exchange.hostlist import why_no_host
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.facts.names import HostsLine, NameFacts
from rankscope.preflight.model import CheckFinding, Fix, NodeReport, Status
from rankscope.preflight.system import Resolved


@dataclass(frozen=True)
class NameAnswer:
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
    def is_dead_first(self) -> bool:
        """Return whether the address that is taken first is IPv6, and does not answer."""
        dial = self.dial_of(self.addresses[0])
        return dial is not None and ":" in self.addresses[0] and dial.outcome in CLOSED

    @property
    def has_arrived(self) -> bool:
        """Return whether a call by this name has reached the target's agent."""
        dials = [self.dial_of(address) for address in self.addresses]
        return any(dial is not None and dial.outcome == "ok" for dial in dials)


def answers(run: Run) -> Iterator[NameAnswer]:
    """Yield what each node gets for each peer, and for MASTER_ADDR where that is another name.

    MASTER_ADDR is no name of rank 0's node but of whichever node it means: `meant_by`.
    """
    owned = owners(run)
    meant: dict[str, str] = {}
    for start, end, path in run.edges():
        if path.resolved is not None and path.resolved.addresses:
            yield NameAnswer(start, end, path.resolved.name, path.resolved.addresses, path)
    for report in run.present:
        names = report.facts.names
        asked = names.master if names is not None else None
        if asked is None or not asked.addresses or is_address(asked.name):
            continue
        if asked.name not in meant:
            meant[asked.name] = meant_by(run, asked.name, owned)
        target = meant[asked.name]
        edge = EdgeFacts() if target == report.node else report.edges.get(target)
        if edge is None:
            continue
        if edge.resolved is None or edge.resolved.name != asked.name:
            dial = dial_of(run, report.node)
            edge = msgspec.structs.replace(edge, master=dial or edge.master)
            yield NameAnswer(report.node, target, asked.name, asked.addresses, edge)


def own_addresses(run: Run, node: str) -> tuple[str, ...]:
    """Return the addresses of a node that others could reach: none of a single link."""
    report = run.reports.get(node)
    addresses = report.addresses if report is not None else ()
    return tuple(
        one for one in addresses if is_address(one) and not one.lower().startswith("fe80:")
    )


def hosts_line(run: Run, answer: NameAnswer, address: str) -> HostsLine | None:
    """Return the line of the holder's /etc/hosts that says so; None: it came from elsewhere."""
    names = run.reports[answer.holder].facts.names
    for line in names.hosts_lines if names is not None else ():
        words = line.text.partition("#")[0].split()
        if words[:1] == [address] and answer.name in words[1:]:
            return line
    return None


def _source(run: Run, answer: NameAnswer, address: str, else_by: str = "a resolver") -> str:
    line = hosts_line(run, answer, address)
    return f'line {line.number} of /etc/hosts: "{line.text}"' if line else else_by


def hosts_fix(run: Run, answer: NameAnswer, address: str) -> Fix:
    """Return what puts the target's real address where the holder has `address`."""
    right = best_address(run, answer)
    line = hosts_line(run, answer, address)
    wanted = f"{right} {answer.name}" if right else ""
    if line is None or why_no_host(answer.name):
        asked = shlex.quote(answer.name)
        command = f"getent ahosts {asked}  # comes from a name server: mend the entry there"
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


def best_address(run: Run, answer: NameAnswer) -> str:
    """Return the address of the target that belongs into the entry."""
    owned = own_addresses(run, answer.target)
    chosen = run.gloo_address(answer.target)
    if chosen in owned:
        return chosen
    return next((one for one in owned if ":" not in one), next(iter(owned), ""))


def _by_name(run: Run, host: str, name: str) -> Iterator[str]:
    """Yield the nodes that call `host` by this name anyway: a failure there is another finding."""
    for start, end, edge in run.edges():
        if end == host and edge.resolved is not None and edge.resolved.name == name:
            yield start


# c10d and gloo ask many times; a resolver with a cache answers within 10 ms
MASTER_SLOW_MS = 1000.0
_UNRESOLVED: dict[Mode, str] = {
    "static": "'gai error' again and again on that node; all end after 15 to 30 min",
    "c10d": "'gai error' again and again on that node; all end after 10 min",
    "env": "'gai error' again and again on that node; all end after 30 min",
}


class DnsMaster(BuiltinCheck, id="dns.master"):
    """Every node resolves the name of the master, within a second."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where there is no answer, warn where it is slow."""
        yield from self.not_measured(run, "names")
        answers = run.each(lambda facts: facts.names.master if facts.names else None)
        if run.each(lambda facts: facts.names) and not answers:
            yield self.skipped("MASTER_ADDR is not set on any node")
        failed = grouped(((a.name, a.error), node) for node, a in answers.items() if a.error)
        for (name, error), nodes in failed.items():
            yield self._failed(run, name, error, nodes)
        yield from self._workers(run)
        slow = {n: a for n, a in answers.items() if not a.error and a.elapsed_ms > MASTER_SLOW_MS}
        if slow:
            yield self._slow(run, slow)

    def _workers(self, run: Run) -> Iterator[CheckFinding]:
        """In c10d mode the workers meet at the full name of the node that gets rank 0."""
        host, name = worker_host(run)
        addresses, known = own_addresses(run, host), {edge for edge in _by_name(run, host, name)}
        lost: dict[str, str] = {}
        for report in run.present:
            asked = report.endpoint.workers if report.endpoint is not None else None
            if not host or asked is None or report.node in known:
                continue
            is_right = not asked.addresses or bool({*asked.addresses} & {*addresses})
            if asked.error or (not is_right and report.node != host):
                lost[report.node] = asked.error or f"it is {' '.join(asked.addresses)} there"
        if lost:
            fix = Fix(
                node=host,
                command=f"export PET_LOCAL_ADDR={word(way_to(run, host))}  # torchrun --local-addr",
            )
            yield self.fail(
                f"{listed(lost)} cannot find {name}, as {host} calls itself: with c10d the "
                "workers meet there",
                nodes=(host,) if len(lost) > 1 or host in lost else lost,
                edges=((node, host) for node in lost if node != host),
                evidence={"name": name, "errors": lost},
                lines=shortened(f"{node}: {name}: {why}" for node, why in lost.items()),
                fix=(fix,),
                impact="the rendezvous succeeds, then the workers of these nodes wait for a store "
                "that they cannot find: 'gai error', and all give up after 10 to 30 min",
                unless="another node joins first and gets rank 0",
                confidence="likely",
            )

    def _failed(self, run: Run, name: str, error: str, nodes: list[str]) -> CheckFinding:
        is_silent = error.startswith("no answer")
        return self.fail(
            f"{listed(nodes)} cannot resolve {name}: {error}",
            nodes=nodes,
            evidence={"name": name, "error": error, "variable": "MASTER_ADDR"},
            lines=(f"{node}: getaddrinfo({name!r}): {error}" for node in nodes[:4]),
            fix=_master_line(run, name, nodes),
            impact=_UNRESOLVED[run.mode],
            unless="the resolver does answer, but only later" if is_silent else "",
            confidence="likely" if is_silent else "proven",
        )

    def _slow(self, run: Run, slow: dict[str, Resolved]) -> CheckFinding:
        node, worst = max(slow.items(), key=lambda item: item[1].elapsed_ms)
        return self.warn(
            f"{worst.name} takes {worst.elapsed_ms / 1e3:.1f} s to resolve",
            at=slow,
            evidence={node: {"elapsed_ms": a.elapsed_ms} for node, a in slow.items()},
            lines=(f"{node}: {worst.elapsed_ms:.0f} ms for {', '.join(worst.addresses)}",),
            fix=_master_line(run, worst.name, list(slow)),
            impact="each process asks several times: the start takes longer, or times out",
            unless="the resolver was busy just then",
        )


def _master_line(run: Run, name: str, nodes: list[str]) -> tuple[Fix, ...]:
    """Return the line for /etc/hosts, with an address of the node that the name means.

    A name that means no node is given to the one with rank 0: there the store will be.
    """
    target = meant_by(run, name, owners(run)) or run.master
    addresses = own_addresses(run, target)
    if not addresses or why_no_host(name) or not _is_as_given(run, name):
        return ()
    address = run.gloo_address(target)
    if address not in addresses:
        address = addresses[0]
    command = f"echo {shlex.quote(f'{address} {name}')} | sudo tee -a /etc/hosts"
    return on_each(nodes, command, "admin")


def _is_as_given(run: Run, name: str) -> bool:
    """Return whether a name is surely that of the launch: "_" may be what came of a character."""
    hosts = run.each(lambda facts: facts.host.hostname if facts.host is not None else None)
    return "_" not in name or name in (*run.expected, *hosts.values())


_NUMBER = r"(?:0[xX][0-9a-fA-F]+|[0-9]+)"


class DnsDigits(BuiltinCheck, id="dns.digits", scope="all"):
    """No host name is a number, which the resolver takes for an IPv4 address.

    getaddrinfo reads "1234" as 0.0.4.210 before it asks /etc/hosts or DNS, so that a host of this
    name can never be reached by it.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on such a master or peer, and on such an own name."""
        uses: dict[str, list[str]] = defaultdict(list)
        for report in run.present:
            launch, names = report.facts.launch, report.facts.names
            if launch is not None and launch.master_addr:
                uses[launch.master_addr].append(f"MASTER_ADDR on {report.node}")
            if names is not None:
                uses[names.hostname].append(f"own name of {report.node}")
        for name in run.expected:
            uses[name].append("name of a node")
        for name, where in uses.items():
            address = read_as_address(name)
            if address:
                yield self._finding(run, name, address, where)

    def _finding(self, run: Run, name: str, address: str, where: list[str]) -> CheckFinding:
        hostnames = run.each(lambda facts: facts.names.hostname if facts.names else None)
        owners = [r.node for r in run.present if name in (r.node, hostnames.get(r.node))]
        real = next((a for n in owners for a in run.reports[n].addresses), "")
        fix = on_each(owners, f"sudo hostnamectl set-hostname node{name}", "admin")
        if is_address(real) and any(use.startswith("MASTER_ADDR") for use in where):
            fix = (point_to(run, real), *fix)
        return self.fail(
            f"the host name {name} is a number: the resolver reads it as {address}",
            nodes=owners,
            evidence={"name": name, "read_as": address, "used_as": where},
            lines=where[:4],
            fix=fix,
            impact="gloo and the store dial another address: time-outs after 15 to 30 min",
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


class DnsLoopback(BuiltinCheck, id="dns.loopback", scope="all", needs=("peers",)):
    """No peer's name leads back to the node that asks.

    Installers write `127.0.1.1 NAME` into /etc/hosts; a copied file does that for another node.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the first answer is loopback, warn where a later one is."""
        groups: dict[tuple[str, Status], list[tuple[NameAnswer, str]]] = defaultdict(list)
        for answer in answers(run):
            address = next((one for one in answer.addresses if is_loopback(one)), "")
            if address and answer.holder != answer.target:
                status: Status = "fail" if address == answer.addresses[0] else "warn"
                groups[answer.target, status].append((answer, address))
        for (target, status), some in groups.items():
            holders = ordered(run, {answer.holder for answer, _ in some})
            yield self.finding(
                status,
                f"on {listed(holders)} the name {some[0][0].name} is {some[0][1]}: loopback",
                nodes=holders,
                edges=dict.fromkeys((answer.holder, target) for answer, _ in some),
                evidence={"addresses": {a.holder: list(a.addresses) for a, _ in some}},
                lines=shortened(
                    f"{a.holder}: {a.name} is {address}, says {_source(run, a, address)}"
                    for a, address in some
                ),
                fix=dict.fromkeys(hosts_fix(run, answer, address) for answer, address in some),
                unless="the job names its nodes by address and never by name",
            )


class DnsSelfLoopback(BuiltinCheck, id="dns.self.loopback", needs=("peers",)):
    """The own host name resolves to an address of this machine, not to 127.x.

    gloo advertises the address that its host name resolves to. Distributions write
    "127.0.1.1 NAME" into /etc/hosts, and then the peers of each node call themselves.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail with gloo, warn with NCCL alone; GLOO_SOCKET_IFNAME heals it."""
        yield from self.not_measured(run, "interfaces")
        wrong = _wrong_about_themselves(run)  # there gloo falls back to loopback: one cause
        trapped = {
            r.node: c
            for r in run.present
            if r.node not in wrong and (c := loopback_by_name(r)) is not None
        }
        if not trapped:
            return
        nodes = tuple(trapped)
        lines = [line for node in nodes[:4] for line in _loopback_lines(run, node, trapped[node])]
        yield self.finding(
            "fail" if run.backend == "gloo" else "warn",
            f"the own host name means {_meaning(run, trapped)}, which gloo advertises",
            at=nodes,
            evidence={node: _evidence(run, node, choice) for node, choice in trapped.items()},
            lines=lines,
            fix=(fix for node in nodes for fix in _fixes(run, node)),
            impact=_loopback_impact(run, nodes),
            unless="the job never uses gloo" if run.backend != "gloo" else "",
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


def _loopback_lines(run: Run, node: str, choice: Choice) -> Iterator[str]:
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
        yield Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={shlex.quote(interface)}")
    if names is None or not address:
        return
    if not why_no_host(names.hostname):
        yield Fix(node=node, command=_own_line(names, address), owner="admin")


def _own_line(names: NameFacts, address: str) -> str:
    """Return the command that gives the own name this address, and no loopback one."""
    edits = []
    for line in names.hosts_lines:
        words = line.text.split()
        if is_local(words[0]) and names.hostname in words[1:]:
            label = names.hostname.replace(".", r"\.")
            edit = f"{line.number}s/[[:space:]]{label}\\b//"
            if words[1:] == [names.hostname]:
                edit = f"{line.number}s/^/# /"
            edits.append(edit)
    wanted = f"{address} {names.hostname}"
    if not edits:
        return f"echo {shlex.quote(wanted)} | sudo tee -a /etc/hosts"
    # in place: in containers /etc/hosts is a mount, which `sed -i` cannot replace
    script = shlex.quote("; ".join([*edits, f"$a{wanted}"]))
    command = f"sudo cp /etc/hosts /etc/hosts.old && sed {script} /etc/hosts.old"
    return f"{command} | sudo tee /etc/hosts"


def _loopback_impact(run: Run, nodes: tuple[str, ...]) -> str:
    """gloo's higher address dials the lower one: a single 127.x above all others passes by luck."""
    others = [run.gloo_address(r.node) for r in run.present if r.node not in nodes]
    is_lower = [_first_byte(address) < 127 for address in others if _first_byte(address) >= 0]
    if len(nodes) == 1 and others and len(is_lower) == len(others) and all(is_lower):
        return (
            "works today with gloo, by luck: the higher address dials, and 127.x is higher than "
            "all others here; fails when the addresses are above 127, or a second node does this"
        )
    return (
        "gloo init: the others dial their own loopback: 'Connection refused, remote=[127...]' "
        "after 5 to 30 s on some ranks, the rest hang for more than 30 min"
    )


def _first_byte(address: str) -> int:
    head = address.partition(".")[0]
    return int(head) if head.isdigit() else -1


Wrong = tuple[NameAnswer, str]


def _wrong_about_themselves(run: Run) -> set[str]:
    """Return the nodes for which `dns.wrong` says that they get a wrong address for themselves."""
    owned = owners(run)
    own = (answer for answer in answers(run) if answer.holder == answer.target)
    return {answer.holder for answer in own if _wrong(run, answer, owned) is not None}


class DnsWrong(BuiltinCheck, id="dns.wrong", scope="all", needs=("peers",)):
    """The address that a node gets for a peer is one that this peer has."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
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
        self,
        run: Run,
        status: Status,
        some: list[Wrong],
        blamed: tuple[str, ...],
        owned: Mapping[str, frozenset[str]],
    ) -> CheckFinding:
        answer, address = some[0]
        whose = listed(sorted(owned.get(address, frozenset()))) or "none of the nodes"
        who = f"on {listed(blamed)}" if blamed else "for every node"
        names = list(dict.fromkeys(one.name for one, _ in some))
        what = f"the name {answer.name} is {address}, which {whose} has"
        if len(names) > 1:
            what = f"the names {listed(names)} have wrong addresses"
        lines = []
        for one, wrong in some:
            where = _source(run, one, wrong, "a name server")
            right = ", ".join(own_addresses(run, one.target)) or "not known"
            lines.append(f"{one.holder}: {one.name} is {wrong} ({where}); it has {right}")
            dial = one.dial_of(wrong)
            if dial is not None:
                by = f", answered by {dial.answered_by}" if dial.answered_by else ""
                lines.append(f"{one.holder}->{wrong}  {dial.outcome}{by}")
        return self.finding(
            status,
            f"{who} {what}",
            nodes=blamed,
            edges=dict.fromkeys((one.holder, one.target) for one, _ in some),
            evidence={
                "name": answer.name,
                "wrong_address": address,
                "right_address": best_address(run, answer),
                "is_first": status == "fail",
            },
            lines=shortened(lines),
            fix=dict.fromkeys(hosts_fix(run, one, wrong) for one, wrong in some),
            unless=f"{address} is translated to {answer.target} on the way (NAT)",
        )


def _wrong(
    run: Run, answer: NameAnswer, owned: Mapping[str, frozenset[str]]
) -> tuple[str, Status] | None:
    """Return the wrong address; it fails where no answer is right, and warns where one is."""
    if answer.target not in run.reports:
        # all that is known of it is who answered in its place
        first = answer.dial_of(answer.addresses[0])
        # an agent with a name that is no node's was given another list: env.nodes
        if (
            first is not None
            and first.outcome == "wrong-host"
            and first.answered_by in run.expected
        ):
            return answer.addresses[0], "fail"
        return None
    right = own_addresses(run, answer.target)
    outside = [a for a in answer.addresses if not is_loopback(a)]
    if not right:
        return None  # nothing to compare it with
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


_IPV4_FIRST = "echo 'precedence ::ffff:0:0/96 100' | sudo tee -a /etc/gai.conf"


class DnsFamily(BuiltinCheck, id="dns.family", scope="all", needs=("peers",)):
    """The first address of a name works, and all nodes share IPv4 or IPv6."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Look for nodes without a common family, then for those that gloo takes, then at names."""
        apart = [*self._apart(run)] or [*self._chosen_apart(run)]
        yield from apart
        failed = {node for one in apart if one.status == "fail" for node in one.nodes}
        yield from self._dead_first(run, failed)

    def _dead_first(self, run: Run, known: Collection[str]) -> Iterator[CheckFinding]:
        groups: dict[tuple[str, Status], list[NameAnswer]] = defaultdict(list)
        for answer in answers(run):
            if answer.target in known:
                continue
            first = answer.addresses[0]
            if not answer.is_dead_first:
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
            lines = []
            for answer in some:
                dial = answer.dial_of(answer.addresses[0])
                how = dial.outcome if dial is not None else "not tried"
                lines.append(f"{answer.holder}: {' '.join(answer.addresses)}; the first: {how}")
            fixes = [hosts_fix(run, answer, answer.addresses[0]) for answer in some]
            where = holders[0] if len(holders) == 1 else ""
            fixes.append(Fix(node=where, command=_IPV4_FIRST, owner="admin"))
            yield self.finding(
                status,
                f"on {listed(holders)} the first address of {one.name}, {one.addresses[0]}, "
                f"is dead; {later}",
                nodes=holders,
                edges=dict.fromkeys((a.holder, target) for a in some),
                evidence={"addresses": list(one.addresses)},
                lines=shortened(lines),
                fix=dict.fromkeys(fixes),
                unless="the job asks for IPv4 alone",
            )

    def _apart(self, run: Run) -> Iterator[CheckFinding]:
        families = {
            report.node: frozenset(6 if ":" in one else 4 for one in own)
            for report in run.present
            if (own := own_addresses(run, report.node))
        }
        only_6 = ordered(run, {node for node, some in families.items() if some == {6}})
        only_4 = ordered(run, {node for node, some in families.items() if some == {4}})
        if not only_6 or len(only_6) == len(families):
            return
        lines = [f"IPv6 alone: {listed(only_6)}"]
        if only_4:
            lines.append(f"IPv4 alone: {listed(only_4)}")
        yield self.finding(
            "fail" if only_4 else "warn",
            f"{listed(only_6)}: no IPv4 address, others have one"
            + ("" if only_4 else "; IPv6 is all that they share"),
            nodes=only_6,
            evidence={"only_ipv6": list(only_6), "only_ipv4": list(only_4)},
            lines=lines,
            fix=on_each(only_6[:4], "ip -4 -br address  # give it an IPv4 address", "admin")
            if only_4
            else (Fix(command="export NCCL_SOCKET_FAMILY=AF_INET6"),),
            unless="the missing addresses are on an interface that this process does not see",
        )

    def _chosen_apart(self, run: Run) -> Iterator[CheckFinding]:
        """All have a family in common, and gloo takes an address of the other one on some."""
        chosen = {
            report.node: address
            for report in run.present
            if (address := run.gloo_address(report.node)) and not is_local(address)
        }
        six = ordered(run, {node for node, address in chosen.items() if ":" in address})
        four = ordered(run, set(chosen) - set(six))
        if not six or not four:
            return
        is_six_odd = len(six) < len(four) or (len(six) == len(four) and run.master in four)
        odd, usual = (six, four) if is_six_odd else (four, six)
        yield self.finding(
            "fail" if run.backend == "gloo" else "warn",
            f"{listed(odd)}: gloo takes an {_version(odd, chosen)} address, and an "
            f"{_version(usual, chosen)} address on {listed(usual)}",
            nodes=odd,
            evidence={"addresses": chosen},
            lines=(f"{n}: {chosen[n]}: {_how(run, n)}" for n in (*odd[:4], *usual[:2])),
            fix=_ipv4_first(run, odd, six) or _one_family(run, six, four),
            impact="gloo init: 'enforce fail ... ss1.ss_family == ss2.ss_family' on some ranks, "
            "the rest hang for more than 30 min",
            unless="" if run.backend == "gloo" else "the job never uses gloo",
        )


def _version(nodes: Collection[str], chosen: Mapping[str, str]) -> str:
    return "IPv6" if ":" in chosen[next(iter(nodes))] else "IPv4"


def _how(run: Run, node: str) -> str:
    facts = run.reports[node].facts.interfaces
    return facts.gloo[0].how if facts is not None and facts.gloo else ""


def _ipv4_first(run: Run, odd: Collection[str], six: Collection[str]) -> tuple[Fix, ...]:
    """Return what lets names lead to IPv4 first, where those of the odd nodes do so in vain."""
    is_dead = any(answer.is_dead_first for answer in answers(run) if answer.target in odd)
    return on_each(six, _IPV4_FIRST, "admin") if is_dead else ()


def _one_family(run: Run, six: Collection[str], four: Collection[str]) -> Iterator[Fix]:
    """Yield what makes gloo take IPv4 everywhere; where a node has none, its name must change.

    Of an interface that is named, gloo takes the first address.
    """
    for node in six:
        interface = interface_towards(run, node)
        first = interface.addresses[:1] if interface is not None else ()
        if interface is not None and first and ":" not in first[0]:
            yield Fix(node=node, command=f"export GLOO_SOCKET_IFNAME={word(interface.name)}")
        else:
            name = run.reports[node].facts.names
            called = quoted(name.hostname) if name is not None else "its own name"
            yield Fix(
                node=node,
                command=f"# let {called} lead to an IPv4 address on this node, or to an IPv6 "
                f"address on {listed(four)}: one family for all",
                owner="admin",
            )


REVERSE_SLOW_MS = 1000.0  # the store asks at each connection: at 64 ranks that adds a minute


class DnsReverse(BuiltinCheck, id="dns.reverse", needs=("peers",)):
    """The resolver answers at once when asked which name an address has."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where the slowest answer, or its absence, took more than a second."""
        yield from self.not_measured(run, "names")
        all_names = run.each(lambda facts: facts.names)
        slow = {node: n for node, n in all_names.items() if n.reverse_ms > REVERSE_SLOW_MS}
        if not slow:
            return
        node, worst = max(slow.items(), key=lambda item: item[1].reverse_ms)
        yield self.warn(
            f"the name of {worst.reverse_of} takes {worst.reverse_ms / 1e3:.1f} s to look up",
            at=slow,
            evidence={n: {"reverse_ms": facts.reverse_ms} for n, facts in slow.items()},
            lines=(f"{node}: getnameinfo({worst.reverse_of}): {worst.reverse_ms:.0f} ms",),
            fix=(
                Fix(
                    node=n,
                    command=f"echo {shlex.quote(f'{facts.reverse_of} {name}')} "
                    "| sudo tee -a /etc/hosts",
                    owner="admin",
                )
                for n, facts in slow.items()
                if is_address(facts.reverse_of)
                and not why_no_host(name := _name(run, facts.reverse_of))
            ),
            impact="the store of c10d asks at each connection it accepts: the start is slow",
            unless="the resolver was busy just then",
        )


def _name(run: Run, address: str) -> str:
    """Return the node that has an address."""
    return next((r.node for r in run.present if address in r.addresses), "NAME")


class HostDup(BuiltinCheck, id="host.dup", scope="all", needs=("peers",)):
    """No two nodes are the same machine, and no two have the same host name.

    NCCL takes ranks with the same host name and boot id for neighbours that share memory;
    torchrun lets every node that is called like the endpoint host the store.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on two agents in one place; warn on one name for two machines."""
        yield from self.not_measured(run, "host")
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

    def _same_place(self, run: Run, nodes: tuple[str, ...]) -> CheckFinding:
        hosts = [run.reports[node].facts.host for node in nodes]
        name = next((host.hostname for host in hosts if host is not None), "")
        return self.fail(
            f"{listed(nodes)} are the same machine ({name}): two agents on one host",
            nodes=nodes,
            evidence={
                node: {"boot_id": host.boot_id, "network_namespace": host.network_namespace}
                for node, host in zip(nodes, hosts, strict=True)
                if host is not None
            },
            lines=("start one agent on each machine: check the list of nodes",),
            impact="both launchers want the same port and the same GPUs, and one machine is idle",
            unless="two launchers on one machine are meant",
        )

    def _same_name(
        self, run: Run, name: str, nodes: tuple[str, ...], is_same_boot: bool
    ) -> CheckFinding:
        masters = {launch.master_addr for launch in run.launches.values()}
        hosts_store = run.mode == "c10d" and name in masters
        shares_memory = run.backend == "nccl" and is_same_boot
        status: Status = "fail" if hosts_store or shares_memory or is_local(name) else "warn"
        would = "names in logs and reports are mixed up"
        if hosts_store:
            would = "each of them hosts a store of its own: RendezvousTimeoutError after 10 min"
        elif is_local(name):
            would = "gloo advertises loopback on each of them: their peers call themselves"
        elif shares_memory:
            would = "NCCL takes them for one machine and tries shared memory: init fails"
        return self.finding(
            status,
            f"{listed(nodes)} are all called {name}",
            nodes=nodes,
            evidence={"hostname": name, "nodes": list(nodes)},
            lines=(f"{n}: {', '.join(run.reports[n].addresses[:3])}" for n in nodes[:4]),
            fix=(
                Fix(
                    node=n,
                    command=f"sudo hostnamectl set-hostname {shlex.quote(_own_label(name, n, i))}",
                    owner="admin",
                )
                for i, n in enumerate(nodes)
            ),
            impact=would,
        )


def _own_label(shared: str, node: str, number: int) -> str:
    """Return a host name that no other node has: the one it is listed by, where that is a name."""
    is_listed = node != shared and not is_address(node)
    return node if is_listed else f"{'node' if is_local(shared) else shared}-{number}"
