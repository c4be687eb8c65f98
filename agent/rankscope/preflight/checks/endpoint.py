"""Whether the node that will have rank 0 is where all nodes look for it, and who the nodes are."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from rankscope.preflight.checks.base import (
    BuiltinCheck,
    Run,
    is_ranked,
    listed,
    on_each,
    opens_store,
)
from rankscope.preflight.checks.comparing import odd_ones
from rankscope.preflight.checks.meeting import (
    NO_NODE,
    addresses_of,
    dial_of,
    is_local,
    leads_to,
    point_to,
    said_by,
    way_to,
)
from rankscope.preflight.checks.pairs import ordered, owners, shortened
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.facts.launch import Mode
from rankscope.preflight.model import CheckFinding, Fix

_ELSEWHERE: dict[Mode, str] = {
    "static": "no store is where all look for it: torchrun on all nodes gives up after 15 min",
    "c10d": "no node hosts the store: RendezvousConnectionError after 1 min, or "
    "RendezvousTimeoutError after 10 min",
    "env": "rank 0 hosts the store, and no rank finds it, rank 0 included: all give up after "
    "30 min",
}
# torchrun reads its options from such variables, too
_IS_HOST = 'export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=1"  # --rdzv-conf'
_SEEN = {
    "refused": "nothing listens there", "drop": "no answer", "no-arp": "no host has it",
    "not-us": "another program answers", "no-data": "it accepts, and sends nothing",
    "prohibited": "a firewall rejects it", "no-route": "there is no route to it",
    "no-local-port": "no local port is left for the call",
}  # fmt: skip


class EnvMasterRank0(BuiltinCheck, id="env.master.rank0", scope="all", needs=("peers",)):
    """MASTER_ADDR leads to the node that will have rank 0 and opens the store there.

    torchrun's static rendezvous opens it on node rank 0, env:// on RANK 0, and c10d on each node
    that takes the endpoint's name or address for its own. An address that no node has (a virtual
    one, a load balancer) is fine as long as rank 0 answers there.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where no node's MASTER_ADDR leads to rank 0, or where c10d has not one store."""
        if run.mode == "c10d":
            yield from self._hosts(run)
            return
        zeros = [r.node for r in run.present if r.node_rank == 0 and is_ranked(r)]
        if len(zeros) != 1:
            return  # env.rank.unique's matter, or node.absent's
        owned = owners(run)
        leads = {
            report.node: lead
            for report in run.present
            if (lead := leads_to(run, report.node, owned)) is not None
        }
        if not leads:
            return
        if zeros[0] not in leads.values():
            yield from self._elsewhere(run, zeros[0], leads)
        else:
            yield from self._virtual(run, zeros[0], leads)

    def _elsewhere(self, run: Run, zero: str, leads: Mapping[str, str]) -> Iterator[CheckFinding]:
        target = Counter(leads.values()).most_common(1)[0][0]
        node = next(one for one, lead in leads.items() if lead == target)
        name, where = said_by(run, node), _shown(run, node)
        if target == NO_NODE and name in run.absent:
            return  # node.absent says that it is not there
        if target:
            title = f"rank 0 runs on {zero}, but MASTER_ADDR {where} is {target}"
            other = f"or start rank 0 on {target} and leave MASTER_ADDR as it is"
        else:
            how = _how(dial_of(run, node))
            title = f"MASTER_ADDR {where} does not lead to {zero}, which has rank 0{how}"
            other = f"or give {zero} the address {where}, if that is what was meant"
        yield self.fail(
            title,
            nodes=(zero,),
            evidence={
                "rank0": zero,
                "master_addr": {one: said_by(run, one) for one in leads},
                "addresses": list(addresses_of(run, node)),
                "leads_to": dict(leads),
            },
            lines=(
                *shortened(_lead_line(run, one, leads[one]) for one in leads),
                f"{zero} has {', '.join(run.reports[zero].addresses[:4]) or 'no address'}",
                other,
            ),
            fix=(_point_to(run, zero),),
            impact=_ELSEWHERE[run.mode],
            unless="the ranks are numbered anew when the job starts",
        )

    def _virtual(self, run: Run, zero: str, leads: Mapping[str, str]) -> Iterator[CheckFinding]:
        """Some reach rank 0 by an address that is no node's, and others do not."""
        good = {a for one, lead in leads.items() if lead == zero for a in addresses_of(run, one)}
        lost = {
            one: dial
            for one, lead in leads.items()
            if lead == NO_NODE
            and (dial := dial_of(run, one)) is not None
            and set(addresses_of(run, one)) & good
        }
        if not lost:
            return
        first, dial = next(iter(lost.items()))
        yield self.fail(
            f"{listed(lost)} cannot reach {zero}, which has rank 0, by the endpoint "
            f"{_shown(run, first)}{_how(dial)}",
            nodes=ordered(run, lost),
            edges=((one, zero) for one in lost if one != zero),
            evidence={"rank0": zero, "class": dial.outcome, "address": dial.address},
            lines=(
                *shortened(_lead_line(run, one, leads[one]) for one in leads),
                f"{dial.address} is an address of none of the nodes: something in between has it",
            ),
            fix=(_point_to(run, zero),),
            impact=_ELSEWHERE[run.mode],
            unless="it answers only while a store listens behind it",
        )

    def _hosts(self, run: Run) -> Iterator[CheckFinding]:
        """A c10d rendezvous has one store: on the node that takes the endpoint for its own."""
        names = {report.node: said_by(run, report.node) for report in run.present}
        if run.absent or not all(names.values()) or any(map(is_local, names.values())):
            return
        opens = {report.node: opens_store(report) for report in run.present}
        if None in opens.values():
            return  # its own name does not resolve: dns.self.loopback
        owned = owners(run)
        leads = {node: leads_to(run, node, owned) or NO_NODE for node in names}
        if not run.store_hosts:
            yield self._not_hosted(run, names, leads)
        elif len(run.store_hosts) > 1:
            yield self._several_host(run, leads)

    def _not_hosted(
        self, run: Run, names: Mapping[str, str], leads: Mapping[str, str]
    ) -> CheckFinding:
        target = Counter(leads.values()).most_common(1)[0][0]
        node = target or next(iter(names))
        where = f"{_shown(run, node)}:{_port(run, node)}"
        if target:
            title = f"{target} does not take the endpoint {where} for its own, though it is"
            fix = Fix(node=target, command=_IS_HOST)
        else:
            title = f"the endpoint {where} is none of the nodes: no one opens the store"
            fix = _point_to(run, run.present[0].node)
        return self.fail(
            title,
            nodes=(target,) if target else (),
            evidence={"endpoints": dict(names), "leads_to": dict(leads)},
            lines=(
                *(line for one in ordered(run, {node}) for line in _own_lines(run, one)),
                "torchrun opens the store where the endpoint is the host name, or an address that "
                "the host name resolves to",
            ),
            fix=(fix,),
            impact=_ELSEWHERE[run.mode],
        )

    def _several_host(self, run: Run, leads: Mapping[str, str]) -> CheckFinding:
        hosts = run.store_hosts
        counted = Counter(lead for lead in leads.values() if lead in hosts)
        right = counted.most_common(1)[0][0] if counted else hosts[0]
        extra = tuple(node for node in hosts if node != right)
        where = _shown(run, right)
        return self.fail(
            f"{listed(hosts)} each take the endpoint {where} for their own, and open a store",
            nodes=extra,
            evidence={"hosts": list(hosts), "leads_to": dict(leads)},
            lines=shortened(line for node in hosts for line in _own_lines(run, node)),
            fix=(_point_to(run, right),),
            impact="each of them waits at a store of its own: RendezvousTimeoutError after 10 min",
        )


def _shown(run: Run, node: str) -> str:
    """Return a node's MASTER_ADDR, with its address where it is a name."""
    name, addresses = said_by(run, node), addresses_of(run, node)
    return name if not addresses or addresses[0] == name else f"{name} ({addresses[0]})"


def _port(run: Run, node: str) -> int:
    endpoint = run.reports[node].endpoint
    return endpoint.port if endpoint is not None else run.master_port


def _how(dial: Dial | None) -> str:
    return f": {_SEEN.get(dial.outcome, dial.outcome)}" if dial is not None else ""


def _lead_line(run: Run, node: str, lead: str) -> str:
    dial = dial_of(run, node)
    if lead:
        by = "answers there" if dial is not None and dial.outcome == "ok" else "has this address"
        return f"{node}: MASTER_ADDR {_shown(run, node)}: {lead} {by}"
    return f"{node}: MASTER_ADDR {_shown(run, node)}: no node has this address{_how(dial)}"


def _own_lines(run: Run, node: str) -> Iterator[str]:
    names = run.reports[node].facts.names
    if names is not None:
        own = " ".join(names.own.addresses) or names.own.error
        yield f"{node}: its host name {names.hostname} resolves to {own}"


def _point_to(run: Run, node: str) -> Fix:
    """Return the setting that has every node look for the store on `node`."""
    return point_to(run, way_to(run, node))


class EnvNodes(BuiltinCheck, id="env.nodes", scope="all", needs=("peers",)):
    """All nodes were given the same list of nodes, and as many as the launch expects."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Name the nodes whose list differs, and those that go by another name."""
        lists = {r.node: r.nodes for r in run.present if r.nodes is not None}
        digests = {node: given.digest for node, given in lists.items()}
        if odd := odd_ones(digests):
            usual = next((node for node in lists if node not in odd), "")
            yield self._differ(run, odd, usual)
        yield from self._renamed(run)
        if not odd:
            yield from self._counted(run)

    def _differ(self, run: Run, odd: tuple[str, ...], usual: str) -> CheckFinding:
        groups: dict[str, list[str]] = defaultdict(list)
        for node in odd:
            groups[_difference(run, node, usual)].append(node)
        says = "; ".join(f"{listed(nodes)} {text}" for text, nodes in groups.items())
        command = _asked_for(run)
        return self.fail(
            f"the lists of nodes differ: {says}" if usual else f"no two lists agree: {says}",
            nodes=odd,
            evidence={
                r.node: {"num": r.nodes.num, "names": list(r.nodes.names), "how": r.nodes.how}
                for r in run.present
                if r.nodes is not None
            },
            lines=shortened(
                f"{r.node} ({r.nodes.how}): {_names(r.nodes.names, r.nodes.num)}"
                for r in run.present
                if r.nodes is not None
            ),
            fix=on_each(odd, command),
            impact="a launch by these lists starts with another number of nodes, or numbers them "
            "otherwise, on each: ranks are missing or double, and all wait for them",
            unless="only preflight was given these lists, and the launch has its own",
        )

    def _renamed(self, run: Run) -> Iterator[CheckFinding]:
        """An agent that answers for a missing node by another name was given another list."""
        called: dict[str, str] = {}
        for _, end, edge in run.edges():
            dial = edge.mesh
            if end not in run.reports and dial is not None and dial.outcome == "wrong-host":
                if dial.answered_by not in run.expected:
                    called[end] = dial.answered_by
        if called:
            node, other = next(iter(called.items()))
            yield self.fail(
                f"the agent on {node} goes by the name {other}: it was given another list of nodes",
                nodes=called,
                evidence={"called": dict(called)},
                lines=shortened(f"{one} answers as {name}" for one, name in called.items()),
                fix=on_each(called, _asked_for(run)),
                impact="the nodes do not know each other by these names: nothing was compared",
                confidence="likely",
            )

    def _counted(self, run: Run) -> Iterator[CheckFinding]:
        """The launch waits for its own number of nodes, however many were listed."""
        given = {r.node: r.nodes.num for r in run.present if r.nodes is not None}
        sizes = {
            (launch.min_nodes or launch.num_nodes, launch.num_nodes)
            for node, launch in run.launches.items()
            if launch.num_nodes and launch.launcher != "hand" and node in given
        }
        if len(sizes) != 1 or not given or run.absent:
            return  # where the launches differ it is env.agree's
        ((least, most),) = sizes
        num = next(iter(given.values()))
        if least is None or most is None or least <= num <= most:
            return
        yield self.fail(
            f"the launch expects {most} node{'s' if most > 1 else ''}, and {num} are listed",
            evidence={"num_expected": most, "num_listed": num},
            lines=(f"{node}: {count} nodes listed" for node, count in list(given.items())[:3]),
            fix=(_sized(run, num),),
            impact="the launch waits for nodes that are never started, or turns the last ones away",
            unless="only some of the job's nodes are checked here",
        )


def _difference(run: Run, node: str, usual: str) -> str:
    """Return in what a node's list differs from the usual one."""
    mine = run.reports[node].nodes
    theirs = run.reports[usual].nodes if usual else None
    assert mine is not None
    if theirs is None:
        return f"has {mine.num}"
    if not mine.names or not theirs.names:
        return f"has {mine.num} nodes, the others {theirs.num}"
    lacks = [name for name in theirs.names if name not in mine.names]
    more = [name for name in mine.names if name not in theirs.names]
    if not lacks and not more:
        return "has another order"
    parts = [f"{word} {listed(some)}" for word, some in (("lacks", lacks), ("adds", more)) if some]
    return " and ".join(parts)


def _names(names: tuple[str, ...], num: int) -> str:
    shown = ",".join(names[:8])
    return f"{shown},... ({num} nodes)" if len(names) > 8 or not names else shown


def _asked_for(run: Run) -> str:
    names = ",".join(run.expected)
    if len(run.expected) > 16:
        return "rankscope preflight  # with the same --nodes as elsewhere"
    return f"rankscope preflight --nodes {shlex.quote(names)}"


def _sized(run: Run, num: int) -> Fix:
    if run.mode == "env":
        world = sum(run.nproc(report.node) for report in run.present)
        return Fix(command=f"export WORLD_SIZE={world}")
    return Fix(command=f"torchrun --nnodes {num} ...")
