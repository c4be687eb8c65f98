"""Reports reach every node that any node can reach, once, and the newest one holds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from rankscope.preflight.exchange.carrier import CarrierError, carry
from rankscope.preflight.exchange.reports import Exchange
from rankscope.preflight.model import NodeReport, Trouble
from rankscope.preflight.probe import mesh
from rankscope.preflight.probe.dial import hang_up
from rankscope.preflight.probe.mesh import Mesh
from rankscope.preflight.probe.wire import Link

THERE, BACK = (b"there", b"back"), (b"back", b"there")  # keys of either end


def exchange(node: str) -> Exchange:
    return Exchange(NodeReport(node=node, started_unix_s=1.0))


def test_merging_is_idempotent_and_indifferent_to_order() -> None:
    one = exchange("a")
    old, new = NodeReport(node="b", version=1), NodeReport(node="b", version=2)
    assert one.add(new)
    assert not one.add(old)
    assert not one.add(new)
    assert one.reports["b"].version == 2
    assert one.mine.claims == {}


def test_an_agent_that_was_started_again_takes_the_place_of_the_old_one() -> None:
    one = exchange("a")
    one.add(NodeReport(node="b", version=9, started_unix_s=1.0, is_leaving=True))
    assert one.add(NodeReport(node="b", version=1, started_unix_s=2.0))
    assert one.reports["b"].started_unix_s == 2.0
    assert one.mine.claims == {}


def test_two_agents_of_one_name_are_published() -> None:
    one = exchange("a")
    one.add(NodeReport(node="a", version=1, started_unix_s=2.0, pid=7))
    one.add(NodeReport(node="b", version=1, started_unix_s=2.0, pid=8))
    assert one.add(NodeReport(node="b", version=1, started_unix_s=3.0, pid=9))
    assert not one.add(NodeReport(node="b", version=5, started_unix_s=2.0, pid=8))
    pids = {node: [claim.pid for claim in claims] for node, claims in one.mine.claims.items()}
    assert pids == {"a": [0, 7], "b": [8, 9]}
    assert one.mine.version == 2  # each was news once
    assert one.reports["a"] == one.mine


def test_the_last_preflight_of_a_node_is_no_second_agent() -> None:
    one = exchange("a")
    for report in (
        NodeReport(node="a", started_unix_s=0.5, stage="done"),
        NodeReport(node="a", started_unix_s=0.5, is_leaving=True),
    ):
        assert not one.add(report)
    assert one.mine.claims == {}


def test_a_node_that_leaves_holds_nobody() -> None:
    one = exchange("a")
    one.publish(stage="pairs")
    one.add(NodeReport(node="b", stage="listening"))
    assert not one.have_reached("pairs")
    one.add(NodeReport(node="b", version=1, stage="listening", is_leaving=True))
    assert one.have_reached("pairs")


@asynccontextmanager
async def chain(
    *nodes: Exchange, on_silence: Callable[[str, str], None] = lambda peer, how: None
) -> AsyncIterator[list[Mesh]]:
    """Link nodes in a chain over real sockets."""
    meshes = [Mesh(one, on_silence) for one in nodes]
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []
    waiting: asyncio.Queue[Mesh] = asyncio.Queue()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(
            asyncio.ensure_future(waiting.get_nowait().attend("left", Link(reader, writer, BACK)))
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    for left, right in itertools.pairwise(meshes):
        waiting.put_nowait(right)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writers.append(writer)
        tasks.append(asyncio.ensure_future(left.attend("right", Link(reader, writer, THERE))))
    yield meshes
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for writer in writers:
        await hang_up(writer)
    server.close()


def test_a_report_crosses_nodes_that_are_not_linked_to_its_author() -> None:
    async def work() -> None:
        nodes = [exchange(name) for name in "abcd"]
        async with chain(*nodes) as meshes:
            nodes[0].publish(stage="done")
            assert await nodes[3].wait(lambda: nodes[3].reports.get("a") == nodes[0].mine, 10)
            assert await nodes[0].wait(meshes[0].all_know, 10)

    asyncio.run(work())


def test_an_idle_mesh_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "RELAY_PAUSE_S", 0.01)
    monkeypatch.setattr(mesh, "STALE_S", 0.01)
    num_woken, woken = 0, mesh._Link._woken

    async def count(link: mesh._Link) -> None:
        nonlocal num_woken
        await woken(link)
        num_woken += 1

    monkeypatch.setattr(mesh._Link, "_woken", count)

    async def work() -> None:
        nodes = [exchange(name) for name in "ab"]
        async with chain(*nodes) as meshes:
            for node, links in zip(nodes, meshes, strict=True):
                assert await node.wait(lambda: len(node.reports) == 2, 10)  # noqa: B023
                assert await node.wait(links.all_know, 10)
            frames: list[int] = []
            nodes[1].watch(lambda: frames.append(1))
            before = num_woken
            while num_woken < before + 20:  # a link that has news to send sends it when it wakes
                await asyncio.sleep(0.005)
            nodes[0].publish(stage="done")
            assert await nodes[1].wait(lambda: nodes[1].reports["a"] == nodes[0].mine, 10)
            assert frames == [1, 1]  # of the report and its frame alone: nothing came before

    asyncio.run(work())


def test_a_peer_that_says_nothing_is_silent_until_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "SILENT_S", 0.2)
    monkeypatch.setattr(mesh, "_LOOK_S", 0.01)
    monkeypatch.setattr(mesh, "BEAT_S", 3600.0)
    seen: list[tuple[str, str]] = []

    async def until(length: int) -> None:
        async with asyncio.timeout(10):
            while len(seen) < length:
                await asyncio.sleep(0.01)

    async def work() -> None:
        nodes = [exchange(name) for name in "ab"]
        async with chain(*nodes, on_silence=lambda *what: seen.append(what)) as meshes:
            watching = asyncio.ensure_future(meshes[0].watch())
            await until(3)
            nodes[1].publish(stage="reached")
            await until(4)
            watching.cancel()
        await until(6)  # both ends see it close

    asyncio.run(work())
    assert {how for _, how in seen[:2]} == {""}  # who opens a link is there
    assert seen[2:4] == [("right", "silent"), ("right", "")]
    assert {how for _, how in seen[4:]} == {"closed"}


class Failing:
    """A carrier that fails, then works."""

    name: ClassVar[str] = "share"

    def __init__(self) -> None:
        self.num_calls = 0

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Fail twice."""
        self.num_calls += 1
        if self.num_calls <= 2:
            raise CarrierError("the directory cannot be written: mount it")
        return [NodeReport(node="b", version=1)]

    async def close(self) -> None:
        """Nothing is open."""


def test_a_side_channel_that_fails_is_told_once_and_tried_again() -> None:
    async def work() -> None:
        one, carrier, told = exchange("a"), Failing(), list[Trouble]()
        task = asyncio.ensure_future(carry(carrier, one, told.append))
        assert await one.wait(lambda: "b" in one.reports, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [t.reason for t in told] == ["the directory cannot be written: mount it"]

    asyncio.run(work())
