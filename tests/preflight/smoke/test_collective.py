"""When the smoke test may start, who takes part, and where the store is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rankscope.preflight.checks.base import Run
from rankscope.preflight.collective.schedule import (
    Collective,
    Store,
    blocked,
    members,
    store_of,
    way_to,
)
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Dial, EdgeFacts, PathMtu
from rankscope.preflight.facts.endpoint import Endpoint
from rankscope.preflight.facts.interfaces import InterfaceFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.ports import PortFacts, PortOwner
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import Facts, Listening, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.plan import Plan
from rankscope.preflight.secret import Secret
from rankscope.preflight.system import System

NAMES = ("a", "b", "c")


def dial(outcome: str = "ok", address: str = "10.0.0.9") -> Dial:
    return Dial(outcome=outcome, address=address, port=4000)  # type: ignore[arg-type]


def run_of(
    edges: dict[tuple[str, str], EdgeFacts] | None = None, ranks: tuple[int, ...] = (0, 1, 2)
) -> Run:
    reports = {}
    for name, rank in zip(NAMES, ranks, strict=True):
        towards = {end: edge for (start, end), edge in (edges or {}).items() if start == name}
        reports[name] = NodeReport(
            node=name, node_rank=rank, addresses=(f"10.0.0.{rank}",), edges=towards,
            listening=Listening(master=29500, store=5000 + rank),
        )  # fmt: skip
    return Run("7", NAMES, reports)


def test_the_master_is_rank_0_whatever_the_order_of_names() -> None:
    run = run_of(ranks=(1, 2, 0))
    assert members(run, "b") == ("c", "a", "b")
    assert blocked(run, members(run, "b")) == ""


def test_the_store_is_sought_where_a_dial_has_arrived() -> None:
    edges = {("b", "a"): EdgeFacts(ephemeral=(dial("drop", "10.0.0.1"), dial()), mesh=dial())}
    assert way_to(run_of(edges), "b", "a") == "10.0.0.9"
    assert way_to(run_of(), "b", "a") == "10.0.0.0"  # its own word
    assert way_to(run_of(), "a", "a") == "127.0.0.1"


def with_endpoint(run: Run, **answered_by: str) -> Run:
    """Return the run whose nodes were given MASTER_ADDR "head", and who answered there."""
    reports = dict(run.reports)
    for node, other in answered_by.items():
        called = Dial(outcome="ok", address="10.0.0.9", port=29500, answered_by=other)
        told = Endpoint(name="head", port=29500, is_said=True, addresses=("10.0.0.9",), dial=called)
        reports[node] = msgspec.structs.replace(reports[node], endpoint=told)
    return Run(run.run_id, run.expected, reports)


def changed(run: Run, node: str, **fields: object) -> Run:
    reports = {**run.reports, node: msgspec.structs.replace(run.reports[node], **fields)}
    return Run(run.run_id, run.expected, reports)


def test_the_order_is_that_of_the_job_s_ranks() -> None:
    run = run_of(ranks=(0, 2, 1))
    assert members(run, "b") == ("a", "c", "b")
    for node, rank in zip(NAMES, (0, 8, 16), strict=True):  # RANK says more than a place in a list
        run = changed(run, node, facts=Facts(launch=LaunchFacts(rank=rank)))
    assert members(run, "b") == ("a", "b", "c")


def test_the_store_is_at_the_job_s_own_endpoint() -> None:
    run = with_endpoint(run_of(), a="a", b="a", c="a")
    assert blocked(run, NAMES) == ""
    assert [store_of(run, name, NAMES) for name in NAMES] == [Store("head", 29500)] * 3
    # where it was only assumed, the ways that were found are taken
    assert store_of(run_of(), "a", NAMES) == Store("127.0.0.1", 29500)
    assert store_of(run_of(), "b", NAMES) == Store("10.0.0.0", 29500)


def test_another_port_only_where_the_launcher_holds_the_job_s() -> None:
    run = with_endpoint(run_of(), a="a", b="a", c="a")
    held = PortOwner(port=29500, pid=7, command="torchrun train.py", is_launcher=True)
    run = changed(run, "a", listening=Listening(store=5000), facts=Facts(
        ports=PortFacts(master_busy=held)
    ))  # fmt: skip
    assert blocked(run, NAMES) == ""
    store = store_of(run, "b", NAMES)
    assert store == Store("head", 5000, "torchrun of this launch holds port 29500")
    other = msgspec.structs.replace(held, is_launcher=False, command="nginx")
    run = changed(run, "a", facts=Facts(ports=PortFacts(master_busy=other)))
    assert blocked(run, NAMES) == "a could not bind port 29500"


def test_it_does_not_meet_where_the_job_would_not() -> None:
    run = with_endpoint(run_of(), a="a", b="a", c="b")
    assert blocked(run, NAMES) == "MASTER_ADDR of c leads to b, and the store will be on a"
    run = with_endpoint(run_of(ranks=(1, 0, 2)), a="a", b="a", c="a")
    for node, rank in (("a", 1), ("b", 0)):
        run = changed(run, node, facts=Facts(launch=LaunchFacts(node_rank=rank)))
    assert "leads to a, and the store will be on b" in blocked(run, members(run, "a"))
    run = with_endpoint(run_of(), a="a", b="a", c="a")
    assert run.reports["c"].endpoint is not None
    drifted = msgspec.structs.replace(run.reports["c"].endpoint, port=29501)
    text = "MASTER_PORT of c is 29501, and that of a 29500"
    assert blocked(changed(run, "c", endpoint=drifted), NAMES) == text


def test_an_endpoint_that_does_not_answer_is_not_waited_for() -> None:
    run = with_endpoint(run_of(), a="a", b="a", c="a")
    run = changed(run, "a", addresses=("10.0.0.9",))
    assert run.reports["c"].endpoint is not None
    closed = Dial(outcome="no-route", address="10.0.0.9", port=29500)
    lost = msgspec.structs.replace(run.reports["c"].endpoint, dial=closed)
    text = "c cannot reach the endpoint 10.0.0.9:29500 (no-route)"
    assert blocked(changed(run, "c", endpoint=lost), NAMES) == text


def test_groups_beside_the_first_meet_elsewhere() -> None:
    run = with_endpoint(run_of(), a="a", b="a", c="a")
    store = store_of(run, "c", ("b", "c"))
    assert (store.port, store.beside) == (5001, "another group holds MASTER_PORT")


def test_what_holds_it_back_is_said() -> None:
    closed = {("b", "c"): EdgeFacts(ephemeral=(dial("drop"),))}
    assert blocked(run_of(closed), NAMES) == "b cannot reach c (drop)"
    assert blocked(run_of(closed), ("a", "b")) == ""  # c is in another group
    run = run_of({("a", "c"): EdgeFacts(ephemeral=(dial("drop"),))})
    for node, where in (("a", "10.0.0.0"), ("c", "10.0.0.2")):
        gloo = InterfaceFacts(gloo=(Choice(interface="eth0", address=where),))
        run = changed(run, node, facts=Facts(interfaces=gloo))
    assert blocked(run, NAMES) == ""  # the lower address never dials the higher one
    hole = {("a", "b"): EdgeFacts(mtu=PathMtu(carried_bytes=1400, large_ok=False))}
    assert blocked(run_of(hole), NAMES) == "large messages from a to b vanish"
    assert blocked(run_of(), (*NAMES, "d")) == "d did not report"
    run = run_of()
    deaf = {**run.reports, "a": msgspec.structs.replace(run.reports["a"], listening=Listening())}
    assert blocked(Run("7", NAMES, deaf), NAMES) == "a has no port for the store"


def plan(**options: str) -> Plan:
    who = Discovery(nodes=NAMES, me="b", node_rank=1, num_nodes=3)
    return Plan(
        run_id="7", key=RunKey.of("t"), secret=Secret(text="t", source="a test"), who=who,
        options=Options(**options), system=System(),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.multiproc
def test_a_closed_path_skips_it_and_leaves_no_child() -> None:
    async def skipped() -> SmokeFacts:
        collective = Collective(plan())
        collective.start(run_of(), lambda _port: None)
        run = run_of({("b", "c"): EdgeFacts(ephemeral=(dial("drop"),))})
        exchange = Exchange(NodeReport(node="b", facts=Facts()))
        facts = await collective.run(exchange, run, print)
        await collective.stop()
        return facts

    facts = asyncio.run(skipped())
    assert (facts.skipped, facts.error, facts.backend) == ("b cannot reach c (drop)", "", "gloo")


def test_who_comes_after_the_start_is_not_waited_for() -> None:
    async def skipped() -> SmokeFacts:
        collective, run = Collective(plan()), run_of()
        late = {name: report for name, report in run.reports.items() if name != "c"}
        collective.start(Run("7", NAMES, late), lambda _port: None)
        return await collective.run(Exchange(NodeReport(node="b")), run, print)

    assert "not all nodes had reported" in asyncio.run(skipped()).skipped


def test_quick_leaves_it_out() -> None:
    async def skipped() -> SmokeFacts:
        collective = Collective(plan(tier="quick"))
        collective.start(run_of(), lambda _port: None)
        assert collective.port == 0
        return await collective.run(Exchange(NodeReport(node="b")), run_of(), print)

    assert asyncio.run(skipped()).skipped == "left out by --quick"
