"""When the collective smoke test may start, and on which nodes: the same answer on every node."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from rankscope.preflight.checks import FAMILIES, meeting
from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.pairs import CLOSED, gloo_dials, owners
from rankscope.preflight.collective.child import SmokeChild
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.options import Options
from rankscope.preflight.plan import Plan

# gloo connects every pair at init: 64 nodes open 2,016 connections, 1,000 would open 499,500 and
# spend the whole budget on it. Groups run at the same time, and each node is in one.
MAX_TOGETHER = 64


def group_of(node: str, names: Sequence[str], limit: int = MAX_TOGETHER) -> tuple[str, ...]:
    """Return those who run together with `node`; the first of them holds the store.

    Groups are neighbours in `names` and of nearly one size, so that none is a single node.
    """
    num_groups = -(-len(names) // limit)
    at = names.index(node) * num_groups // len(names)
    return tuple(name for i, name in enumerate(names) if i * num_groups // len(names) == at)


LEAST_MBIT_PER_S = 30.0  # below, an all-reduce of 4 MB alone takes 2 s and longer
AGENTS_PER_CORE = 2  # each imports torch, 2 s of a core: with more it would be 4 s and longer


class Collective:
    """The smoke test of one node: a child that waits until the paths were found open."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._child: SmokeChild | None = None
        self._left_out = _left_out(plan)

    def start(self, run: Run, lend: Callable[[int], socket.socket | None]) -> None:
        """Start the child early: it imports torch while ports are dialled.

        `lend` gives another handle of a port that the agent listens on.
        """
        self._left_out = self._left_out or _crowded(run)
        if not self._left_out and not run.absent:
            port = run.reports[self._plan.who.me].listening.master
            self._child = SmokeChild(self._plan.system, self._plan.options)
            self._child.start(lend(port) if port else None)

    @property
    def port(self) -> int:
        """Return the port that the child holds for the store; 0: none."""
        return self._child.port if self._child is not None else 0

    async def imported(self) -> None:
        """Wait until the child has imported torch, or has failed to."""
        if self._child is not None:
            await self._child.imported()

    async def run(self, exchange: Exchange, run: Run, leave: Callable[[int], None]) -> SmokeFacts:
        """Release the child if every path that it needs is open; return what it measured.

        `leave` has the agent answer a port no more: the store of the job's rank 0 does so then.
        """
        me = exchange.mine.node
        together = members(run, me)
        reason = self._left_out or blocked(run, together)
        if self._child is None:
            reason = reason or "not all nodes had reported when torch would have been started"
            return SmokeFacts(backend=run.backend, skipped=reason)
        if reason:  # gloo's own address is stored all the same
            await self._child.stop()
            return msgspec.structs.replace(
                self._child.facts(), backend=run.backend, skipped=reason, error="", ended_by=""
            )
        store = store_of(run, me, together)
        if me == together[0] and store.port == run.reports[me].listening.master:
            leave(store.port)
        work = self._child.run(
            rank=together.index(me), nodes=together, address=store.address, port=store.port,
            backend=run.backend, beside=store.beside,
        )  # fmt: skip
        facts = await exchange.unless(lambda: bool(exchange.gone() & set(together)), work)
        return facts if facts is not None else await self._cut_short(exchange.gone(), run.backend)

    async def _cut_short(self, gone: Collection[str], backend: str) -> SmokeFacts:
        """End it, of whose nodes one is gone: what the child says then is about that."""
        assert self._child is not None
        await self._child.stop()
        reason = f"it was under way when {', '.join(sorted(gone)[:4])} went away"
        return msgspec.structs.replace(
            self._child.facts(), backend=backend, skipped=reason, error="", ended_by=""
        )

    async def stop(self) -> None:
        """Leave no process behind."""
        if self._child is not None:
            await self._child.stop()


def members(run: Run, me: str) -> tuple[str, ...]:
    """Return those who run it together with `me`, in the order of the job's ranks.

    The first holds the store: rank 0, or in a c10d rendezvous who takes the endpoint for its own.
    """
    place = {name: number for number, name in enumerate(run.expected)}
    numbers = {report.node: report.node_rank for report in run.present if report.node_rank >= 0}
    ranks = {node: x.rank for node, x in run.launches.items() if x.rank is not None}
    if len(ranks) == len(run.present):
        numbers = ranks
    rest = [name for name in run.expected if name != run.master]
    rest.sort(key=lambda name: (numbers.get(name, place[name]), place[name]))
    return group_of(me, [run.master, *rest])


@dataclass(frozen=True)
class Store:
    """Where a node calls the store."""

    address: str
    port: int
    beside: str = ""  # why not at MASTER_PORT


def store_of(run: Run, me: str, together: Sequence[str]) -> Store:
    """Return the job's own endpoint as `me` believes it; another only for a reason.

    Only where the launcher that started this preflight holds MASTER_PORT is it a port beside it,
    and only groups without the job's rank 0 meet elsewhere.
    """
    first = together[0]
    listening = run.reports[first].listening
    if first != run.master:
        return Store(way_to(run, me, first), listening.store, "another group holds MASTER_PORT")
    name = meeting.said_by(run, me) or (me if me == first else way_to(run, me, first))
    if me == first and not meeting.said_by(run, me):
        name = "127.0.0.1"
    if listening.master:
        return Store(name, listening.master)
    facts = run.reports[first].facts.ports
    held = facts.master_busy if facts is not None else None
    by = (held.command.partition(" ")[0] if held is not None else "") or "the launcher"
    return Store(name, listening.store, f"{by} of this launch holds port {run.master_port}")


def _closed_endpoint(run: Run, together: Sequence[str]) -> str:
    """Return why the nodes cannot meet at the job's endpoint; "" if nothing is known."""
    first = together[0]
    report = run.reports[first]
    facts = report.facts.ports
    held = facts.master_busy if facts is not None else None
    listening = report.listening.master
    if not listening and not (held is not None and held.is_launcher):
        return f"{first} could not bind port {run.master_port}"
    owned = owners(run)
    for name in together:
        lead = meeting.leads_to(run, name, owned)
        endpoint = run.reports[name].endpoint
        if listening and endpoint is not None and endpoint.port not in (0, listening):
            return f"MASTER_PORT of {name} is {endpoint.port}, and that of {first} {listening}"
        if meeting.said_by(run, name) and lead != first:
            to = f"to {lead}" if lead else "to no node"
            return f"MASTER_ADDR of {name} leads {to}, and the store will be on {first}"
        dial = meeting.dial_of(run, name)
        if listening and lead == first and dial is not None and dial.outcome in CLOSED:
            return f"{name} cannot reach the endpoint {dial.address}:{dial.port} ({dial.outcome})"
    return ""


def way_to(run: Run, me: str, first: str) -> str:
    """Return the address of the store: one that this node has reached, where there is one."""
    if me == first:
        return "127.0.0.1"
    edge = run.edge(me, first)
    dials = [*edge.ephemeral, edge.mesh] if edge is not None else []
    reached = [dial.address for dial in dials if dial is not None and dial.outcome == "ok"]
    known = [*reached, run.gloo_address(first), *run.reports[first].addresses, first]
    return next(address for address in known if address)


def blocked(run: Run, together: Sequence[str]) -> str:
    """Return why a collective over these nodes cannot work; "" if nothing is known."""
    absent = [name for name in together if name not in run.reports]
    if absent:
        return f"{', '.join(absent[:4])} did not report"
    gone = [name for name in together if name in run.gone]
    if gone:
        return f"{', '.join(gone[:4])} went away"
    for name in together:
        software = run.reports[name].facts.software
        if software is not None and not software.has_torch:
            return f"torch is not installed on {name}"
        reason = _unusable(run, name)
        if reason:
            return reason
    addresses = [run.gloo_address(name) for name in together]
    twice = next((one for one in addresses if one and addresses.count(one) > 1), "")
    if twice:
        return f"gloo on two nodes advertises {twice}"
    if not run.reports[together[0]].listening.store:
        return f"{together[0]} has no port for the store"
    if together[0] == run.master and (reason := _closed_endpoint(run, together)):
        return reason
    inside = set(together)
    paths = [path for path in run.edges() if {path[0], path[1]} <= inside]
    return next(filter(None, (_closed(run, *path) for path in paths)), "")


def _closed(run: Run, start: str, end: str, edge: EdgeFacts) -> str:
    """Return why a collective cannot use this path, or would take too long on it."""
    failed = [dial.outcome for dial in edge.ephemeral if dial.outcome != "ok"]
    is_dialled = run.backend != "gloo" or gloo_dials(run, start, end) is not False
    if failed and is_dialled:
        return f"{start} cannot reach {end} ({failed[0]})"
    if edge.mtu is not None and not edge.mtu.large_ok:
        return f"large messages from {start} to {end} vanish"
    speed = edge.bandwidth
    if speed is not None and max(speed.mbit_per_s, speed.again_mbit_per_s) < LEAST_MBIT_PER_S:
        return f"it would take too long: {start} sends {end} {speed.mbit_per_s:.1f} Mbit/s"
    return ""


def _unusable(run: Run, name: str) -> str:
    """Return why others cannot reach gloo on this node."""
    interfaces = run.reports[name].facts.interfaces
    for choice in interfaces.gloo if interfaces is not None else ():
        if choice.problem and not choice.address:
            return f"gloo on {name}: {choice.problem}"
    address = run.gloo_address(name)
    if address.startswith("127.") or address == "::1":
        return f"gloo on {name} advertises {address}"
    return ""


def _is_wanted(options: Options) -> bool:
    """Return whether any check of the family is asked for."""
    return any(not options.left_out(check.id, "collective") for check in FAMILIES["collective"])


def _crowded(run: Run) -> str:
    """Return why not, where many agents share a machine, as containers on a laptop do."""
    hosts = [r.facts.host for r in run.present if r.facts.host is not None]
    machines = {host.boot_id: max(host.num_cores, 1) for host in hosts if host.boot_id}
    for boot_id, num_cores in machines.items():
        num = sum(host.boot_id == boot_id for host in hosts)
        if num > AGENTS_PER_CORE * num_cores:
            return f"{num} agents share the {num_cores} cores of one machine"
    return ""


def _left_out(plan: Plan) -> str:
    options = plan.options
    if options.tier == "quick":
        return "left out by --quick"
    if not _is_wanted(options):
        return "left out by --only or --skip"
    if plan.who.num_nodes < 2:
        return "one node has no peers"
    if not plan.is_mesh:
        return "this agent opens no port"
    return "" if find_spec("torch") is not None else "torch is not installed here"
