"""Preflight over a real server process: agents that reach nothing but its HTTP port."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.http import Meeting, ServerCarrier
from rankscope.preflight.facts.edges import Bandwidth, Dial, EdgeFacts, Rtt
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import Facts, LaunchVerdict, Listening, NodeReport
from rankscope_server.preflight.live import FULL_UP_TO_NODES
from tests.server.conftest import ServerProcess
from tests.server.preflights import Start, get

RUNS = "/api/v1/preflight/runs"
NODES = ("node0", "node1", "node2")


def edge(outcome: Any = "ok", mbit: float = 940.0, rtt_ms: float = 0.2) -> EdgeFacts:
    dial = Dial(outcome=outcome, address="10.77.0.2", port=29500, elapsed_ms=1.0)
    rtt = Rtt(num=20, min_ms=rtt_ms, median_ms=rtt_ms, p95_ms=rtt_ms, max_ms=rtt_ms)
    return EdgeFacts(mesh=dial, rtt=rtt, bandwidth=Bandwidth(mbit_per_s=mbit))


def report(node: str, version: int = 1, stage: Any = "done", **more: Any) -> NodeReport:
    values: dict[str, Any] = {
        "node_rank": int(node.removeprefix("node")), "started_unix_s": 1_700_000_000.0,
        "edges": {peer: edge() for peer in NODES if peer != node}, "addresses": ("10.77.0.1",),
        "listening": Listening(master=29500, mesh=29500, ephemeral=(40001, 40002, 40003)),
        "facts": Facts(
            host=HostFacts(hostname=f"{node}.example"),
            launch=LaunchFacts(
                num_nodes=3, node_rank=int(node.removeprefix("node")), master_addr="node0"
            ),
        ),
    }  # fmt: skip
    return NodeReport(node=node, version=version, stage=stage, **(values | more))


class Boards:
    """Boards of nodes, all of which end with the test."""

    def __init__(self) -> None:
        self.made: list[ServerCarrier] = []

    def of(self, server: ServerProcess, node: str, **environ: str) -> ServerCarrier:
        return self.at(
            server.url,
            Meeting(
                run="job-7", node=node, node_rank=int(node.removeprefix("node")), num_nodes=3,
                training_run="train-7",
            ),
            environ=environ,
        )  # fmt: skip

    def at(self, url: str, meeting: Meeting, token: str = "", **more: Any) -> ServerCarrier:
        self.made.append(ServerCarrier(url, meeting, token, **({"environ": {}} | more)))
        return self.made[-1]


@pytest.fixture
def boards() -> Iterator[Boards]:
    boards = Boards()
    yield boards
    for one in boards.made:
        asyncio.run(one.close())


async def until(condition: Callable[[], bool], step: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await step()
            await asyncio.sleep(0.05)


def soon(look: Callable[[], Any]) -> Any:
    """Return what is found, which is saved a moment after it was taken."""
    deadline = time.monotonic() + 10
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def heard_by(board: ServerCarrier, mine: NodeReport) -> list[NodeReport]:
    """Return the first reports that a board brings."""
    return list(soon(lambda: asyncio.run(board.exchange(mine, {}))))


class Agent:
    """The side of a node: a board, and what it heard."""

    def __init__(self, board: ServerCarrier, node: str, **more: Any) -> None:
        self.board, self.mine = board, report(node, **more)
        self.heard: dict[str, NodeReport] = {}

    async def turn(self) -> None:
        have = {node: one.version for node, one in self.heard.items()}
        for one in await self.board.exchange(self.mine, have):
            self.heard[one.node] = one


def test_three_agents_meet_by_key_and_all_say_the_same(start_server: Start, boards: Boards) -> None:
    server = start_server()

    async def work() -> list[LaunchVerdict | None]:
        agents = [Agent(boards.of(server, node), node, stage="pairs") for node in NODES]

        async def turns() -> None:
            await asyncio.gather(*(agent.turn() for agent in agents))

        await until(lambda: all(len(agent.heard) == 2 for agent in agents), turns)
        assert agents[0].heard["node2"] == report("node2", stage="pairs")  # facts, too
        for agent in agents:
            agent.mine = msgspec.structs.replace(agent.mine, version=2, stage="done")
        await until(
            lambda: all(o.stage == "done" for agent in agents for o in agent.heard.values()), turns
        )
        found = await asyncio.gather(*(agent.board.verdict(10.0) for agent in agents))
        assert not any(agent.board.is_evaluator for agent in agents)
        return list(found)

    first, *others = asyncio.run(work())
    assert first is not None
    assert first.reported == first.expected == NODES
    assert others == [first, first]
    (kept,) = soon(lambda: get(server, "/api/v1/preflight/nodes/node1.example")["preflights"])
    assert (kept["node"], kept["run_id"]) == ("node1", "train-7")
    (listed,) = get(server, RUNS)["preflights"]
    assert (listed["id"], listed["num_nodes"]) == (kept["id"], 3)
    assert get(server, f"{RUNS}?run=other")["preflights"] == []


def test_a_server_that_is_killed_goes_on_where_it_was(start_server: Start, boards: Boards) -> None:
    first = start_server("--port", "0")
    agent = Agent(boards.of(first, "node0"), "node0", stage="pairs")
    asyncio.run(agent.turn())
    id = agent.board.id
    saved = "/api/v1/preflight/nodes/node0.example"  # its report names this host
    soon(lambda: get(first, saved)["preflights"])
    first.end(signal.SIGKILL)
    second = start_server()
    shown = get(second, f"{RUNS}/{id}/roster")
    assert [one["node"] for one in shown["nodes"]] == ["node0"]
    assert shown["missing"] == ["node-rank-1", "node-rank-2"]
    held = get(second, f"{RUNS}/{id}/reports")["reports"]
    assert [one["node"] for one in held] == ["node0"]
    again = boards.of(second, "node1")
    heard = heard_by(again, report("node1", stage="pairs"))
    assert again.id == id  # the same key leads to the same preflight
    assert [one.node for one in heard] == ["node0"]


def test_of_many_nodes_the_reports_are_brief_and_the_server_judges(
    start_server: Start, boards: Boards
) -> None:
    server = start_server()
    names = tuple(f"node{number}" for number in range(FULL_UP_TO_NODES + 1))

    async def work() -> LaunchVerdict | None:
        found = [boards.at(server.url, Meeting(run="big", node=n, nodes=names)) for n in names[:2]]
        last = [report(name, stage="pairs") for name in names[:2]]
        heard: list[NodeReport] = []
        while not heard:
            for one, mine in zip(found, last, strict=True):
                heard += await one.exchange(mine, {})
            await asyncio.sleep(0.05)
        assert {one.node for one in heard} <= set(names[:2])
        assert heard[0].facts == Facts()
        assert heard[0].listening.master == 29500
        assert all(one.is_evaluator for one in found)
        for one, mine in zip(found, last, strict=True):
            await one.exchange(msgspec.structs.replace(mine, version=2, stage="done"), {})
        return await found[0].verdict(10.0)

    said = asyncio.run(work())
    assert said is not None
    assert (said.expected, said.reported) == (names, names[:2])
    assert said.is_partial
    assert said.coverage.startswith("tested")


def test_reports_wait_for_news(start_server: Start, boards: Boards) -> None:
    server = start_server()
    agents = [Agent(boards.of(server, node), node, stage="pairs") for node in NODES[:2]]
    asyncio.run(agents[0].turn())
    path = f"{RUNS}/{agents[0].board.id}"
    first = get(server, f"{path}/reports?since=0&wait=20")  # news are packed after a pause
    assert [one["node"] for one in first["reports"]] == ["node0"]
    number = first["number"]
    later = threading.Timer(0.4, lambda: asyncio.run(agents[1].turn()))
    started = time.monotonic()
    later.start()
    news = get(server, f"{path}/reports?since={number}&wait=20")
    waited_s = time.monotonic() - started
    later.join()
    assert [one["node"] for one in news["reports"]] == ["node1"]
    assert 0.3 < waited_s < 15
    assert get(server, f"{path}/reports?since={news['number']}")["reports"] == []


def test_with_a_token_only_the_preflights_own_opens_its_routes(
    start_server: Start, boards: Boards
) -> None:
    server = start_server(RANKSCOPE_TOKEN="secret")
    meeting = Meeting(run="job", node="node0", num_nodes=1)
    stranger = boards.at(server.url, meeting)
    with pytest.raises(CarrierError, match="wants a token"):
        asyncio.run(stranger.exchange(report("node0"), {}))
    mine = boards.at(server.url, meeting, "secret")
    asyncio.run(mine.exchange(report("node0", stage="pairs"), {}))
    own = mine._token
    assert own.startswith("pf-")
    assert get(server, f"{RUNS}/{mine.id}/roster", own)["expected"] == ["node0"]
    assert get(server, "/api/v1/net/whoami", own)["address"] == "127.0.0.1"
    for path in (RUNS, f"{RUNS}/other/roster", "/api/v1/runs", "/api/v1/preflight/nodes/node0"):
        with pytest.raises(urllib.error.HTTPError) as failure:
            get(server, path, own)
        with failure.value as error:
            assert error.code == 401, path
    pasted = boards.at(server.url, Meeting(run=mine.id, node="node1"), own)
    heard = heard_by(pasted, report("node1", stage="pairs"))
    assert [one.node for one in heard] == ["node0"]


def test_nodes_meet_only_if_they_prove_the_same_secret(start_server: Start, boards: Boards) -> None:
    server = start_server()
    by_secret = {}
    for node, secret in (("node0", "a"), ("node1", "a"), ("node2", "b")):
        proof = RunKey.of(secret, "job").derived("meeting").hex()
        by_secret[node] = boards.at(server.url, Meeting(run="job", node=node, proof=proof))
    stranger = boards.at(server.url, Meeting(run="job", node="node9"))  # knows the name alone
    for node, board in (*by_secret.items(), ("node9", stranger)):
        asyncio.run(board.exchange(report(node, stage="pairs"), {}))
    heard = heard_by(by_secret["node0"], report("node0", version=1, stage="pairs"))
    assert {one.node for one in heard} == {"node1"}
    assert len({board.id for board in (*by_secret.values(), stranger)}) == 3
    with pytest.raises(CarrierError, match="under the name job with another secret"):
        heard_by(by_secret["node2"], report("node2", version=1, stage="pairs"))
    shown = json.dumps(get(server, RUNS))
    for board in by_secret.values():
        assert board._meeting.proof[:32] not in shown  # who lists them cannot join


class Proxy(BaseHTTPRequestHandler):
    """A forward proxy as firms have them: absolute addresses, and it wants a password."""

    seen: list[tuple[str, str, str]]
    target: str  # the server that every name leads to

    def _pass_on(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size) if size else None
        self.seen.append((self.command, self.path, self.headers.get("Proxy-Authorization", "")))
        names = ("Authorization", "Content-Type")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        address = self.target + self.path.removeprefix("http://scope.example:8787")
        request = urllib.request.Request(address, body, headers, method=self.command)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as reply:
            data = reply.read()
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_proxy_of_the_environment_is_used_and_shown(start_server: Start, boards: Boards) -> None:
    server = start_server()
    Proxy.seen, Proxy.target = [], server.url
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        environ = {"http_proxy": f"http://me:p%40ss@127.0.0.1:{proxy.server_port}"}
        meeting = Meeting(run="job", node="node0", num_nodes=3)
        through = boards.at("scope.example:8787", meeting, environ=environ)
        asyncio.run(through.exchange(report("node0"), {}))
        assert "through the proxy 127.0.0.1" in through.route
        assert "p@ss" not in through.route
        direct = boards.of(server, "node1", **environ)  # loopback
        asyncio.run(direct.exchange(report("node1"), {}))
        proxy.shutdown()
        thread.join()
    assert [command for command, _, _ in Proxy.seen] == ["POST", "POST", "POST"]
    assert all(path.startswith("http://scope.example:8787/") for _, path, _ in Proxy.seen)
    assert {basic for _, _, basic in Proxy.seen} == {"Basic bWU6cEBzcw=="}  # me:p@ss


@pytest.mark.parametrize("server", ["ftp://x", "http://", "http://127.0.0.1:1"])
def test_what_cannot_work_is_one_sentence(server: str, boards: Boards) -> None:
    meeting = Meeting(run="job", node="node0")
    with pytest.raises(CarrierError) as failure:
        asyncio.run(boards.at(server, meeting).exchange(report("node0"), {}))
    assert "\n" not in str(failure.value)
    assert server in str(failure.value)
