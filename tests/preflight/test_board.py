"""Reports reach every node that anybody can reach, once, and the newest one holds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

from rankscope.preflight.exchange.base import CarrierError
from rankscope.preflight.exchange.board import Board
from rankscope.preflight.exchange.mesh import Mesh
from rankscope.preflight.exchange.side import carry
from rankscope.preflight.model import NodeReport, Trouble
from rankscope.preflight.probe.dial import hang_up


def board(node: str) -> Board:
    return Board(NodeReport(node=node, started_unix_s=1.0))


def test_merging_is_idempotent_and_indifferent_to_order() -> None:
    one = board("a")
    old, new = NodeReport(node="b", version=1), NodeReport(node="b", version=2)
    assert one.add(new)
    assert not one.add(old)
    assert not one.add(new)
    assert one.reports["b"].version == 2
    assert one.duplicates == set()


def test_an_agent_that_was_started_again_takes_the_place_of_the_old_one() -> None:
    one = board("a")
    one.add(NodeReport(node="b", version=9, started_unix_s=1.0, is_leaving=True))
    assert one.add(NodeReport(node="b", version=1, started_unix_s=2.0))
    assert one.reports["b"].started_unix_s == 2.0
    assert one.duplicates == set()


def test_two_agents_with_one_name_are_told() -> None:
    one = board("a")
    one.add(NodeReport(node="a", version=1, started_unix_s=2.0))
    one.add(NodeReport(node="b", version=1, started_unix_s=2.0))
    one.add(NodeReport(node="b", version=1, started_unix_s=3.0))
    assert one.duplicates == {"a", "b"}


def test_a_node_that_leaves_holds_nobody() -> None:
    one = board("a")
    one.publish(stage="pairs")
    one.add(NodeReport(node="b", stage="listening"))
    assert not one.have_reached("pairs")
    one.add(NodeReport(node="b", version=1, stage="listening", is_leaving=True))
    assert one.have_reached("pairs")


@asynccontextmanager
async def chain(*boards: Board) -> AsyncIterator[list[Mesh]]:
    """Link the boards in a chain over real sockets."""
    meshes = [Mesh(one) for one in boards]
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []
    waiting: asyncio.Queue[Mesh] = asyncio.Queue()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.ensure_future(waiting.get_nowait().keep("left", (reader, writer))))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    for left, right in itertools.pairwise(meshes):
        waiting.put_nowait(right)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writers.append(writer)
        tasks.append(asyncio.ensure_future(left.keep("right", (reader, writer))))
    yield meshes
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for writer in writers:
        await hang_up(writer)
    server.close()


def test_a_report_crosses_nodes_that_are_not_linked_to_its_author() -> None:
    async def work() -> None:
        boards = [board(name) for name in "abcd"]
        async with chain(*boards) as meshes:
            boards[0].publish(stage="done")
            assert await boards[3].wait(lambda: boards[3].reports.get("a") == boards[0].mine, 10)
            assert await boards[0].wait(meshes[0].all_know, 10)

    asyncio.run(work())


def test_an_idle_mesh_is_silent() -> None:
    async def work() -> None:
        boards = [board(name) for name in "ab"]
        async with chain(*boards):
            await boards[1].wait(lambda: "a" in boards[1].reports, 10)
            await asyncio.sleep(1.2)
            told: list[int] = []
            boards[1].watch(lambda: told.append(1))
            await asyncio.sleep(1.0)
            assert told == []

    asyncio.run(work())


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
        one, carrier, told = board("a"), Failing(), list[Trouble]()
        task = asyncio.ensure_future(carry(carrier, one, told.append))
        assert await one.wait(lambda: "b" in one.reports, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [t.reason for t in told] == ["the directory cannot be written: mount it"]

    asyncio.run(work())
