"""When the smoke test may start, who takes part, and where the store is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rankscope.preflight.checks.base import Run
from rankscope.preflight.collective.schedule import Collective, blocked, members, way_to
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.facts.edges import Dial, EdgeFacts, PathMtu
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
            listening=Listening(store=5000 + rank),
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


def test_what_holds_it_back_is_said() -> None:
    closed = {("b", "c"): EdgeFacts(ephemeral=(dial("drop"),))}
    assert blocked(run_of(closed), NAMES) == "b cannot reach c (drop)"
    assert blocked(run_of(closed), ("a", "b")) == ""  # c is in another group
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
        collective.start(run_of())
        run = run_of({("b", "c"): EdgeFacts(ephemeral=(dial("drop"),))})
        exchange = Exchange(NodeReport(node="b", facts=Facts()))
        facts = await collective.run(exchange, run)
        await collective.stop()
        return facts

    facts = asyncio.run(skipped())
    assert (facts.skipped, facts.error, facts.backend) == ("b cannot reach c (drop)", "", "gloo")


def test_who_comes_after_the_start_is_not_waited_for() -> None:
    async def skipped() -> SmokeFacts:
        collective, run = Collective(plan()), run_of()
        late = {name: report for name, report in run.reports.items() if name != "c"}
        collective.start(Run("7", NAMES, late))
        return await collective.run(Exchange(NodeReport(node="b")), run)

    assert "not all nodes had reported" in asyncio.run(skipped()).skipped


def test_quick_leaves_it_out() -> None:
    async def skipped() -> SmokeFacts:
        collective = Collective(plan(tier="quick"))
        collective.start(run_of())
        assert collective.port == 0
        return await collective.run(Exchange(NodeReport(node="b")), run_of())

    assert asyncio.run(skipped()).skipped == "left out by --quick"
