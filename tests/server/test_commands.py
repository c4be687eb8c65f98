"""Commands in the server: who may ask for what, handing out, answers, traces, expiry."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from typing import Any

import pytest

from rankscope.cli import ask, main
from rankscope.http import HttpAnswer
from rankscope.wire import schema
from rankscope_server.analysis.asking import STACK_SAMPLES, ask_for_stacks, ask_of_the_slow
from rankscope_server.analysis.stored_findings import StoredFinding
from rankscope_server.api.service import Service
from rankscope_server.store import commands
from tests.server.commands_sent import NOW, Node, answer, registered, state
from tests.server.conftest import TestClient, msgspec


@pytest.fixture
def node(client: TestClient) -> Node:
    node = Node(client, producer="node-a")
    node.take(*(registered(rank, f"node-{'ab'[rank // 2]}") for rank in range(4)))
    return node


def test_a_command_goes_to_the_node_that_speaks_for_its_ranks(
    node: Node, client: TestClient
) -> None:
    other = Node(client, producer="node-b")
    made = node.ask(kind="stacks", ranks=[1, 2])
    assert made["text"] == "Stacks of ranks 1, 2"
    (first,) = node.take(state(0), state(1))
    assert (first["id"], first["kind"], first["ranks"]) == (made["id"], "stacks", [1])
    assert 0 < first["expires_in_seconds"] <= 60
    assert node.states(made) == {1: "sent", 2: "pending"}
    (again,) = node.take(state(1))  # until its answer is there
    assert again["id"] == made["id"]
    (second,) = other.take(state(2), state(3))
    assert second["ranks"] == [2]
    assert node.take(answer(made["id"], 1, "done"), state(1)) == []
    other.take(answer(made["id"], 2, "refused", reason="no handler"))
    assert node.states(made) == {1: "done", 2: "refused"}
    assert not node.get(f"/commands/{made['id']}")["is_open"]


def test_a_collector_that_knows_no_commands_gets_none_and_they_expire(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = node.ask(kind="stacks", ranks=[1])
    assert node.send(state(1))["commands"] == []
    assert node.states(waiting) == {1: "pending"}
    monkeypatch.setitem(commands._LIFETIMES_NS, "stacks", 1)
    made = node.ask(kind="stacks", ranks=[0])
    shown = node.get(f"/commands/{made['id']}")
    assert (shown["is_open"], shown["ranks"][0]["state"]) == (False, "expired")
    assert "older than this server" in shown["ranks"][0]["reason"]
    assert node.take(state(0)) == []


def test_what_may_be_asked_is_bounded(node: Node, client: TestClient) -> None:
    for wanted, status in (
        ({"kind": "reboot"}, 422),
        ({"kind": "profile", "num_steps": 21}, 422),
        ({"kind": "profile", "num_steps": 0}, 422),
        ({"kind": "stacks", "ranks": [-1]}, 422),
        ({"kind": "stacks", "ranks": [9]}, 409),
    ):
        assert "error" in node.ask(status, **wanted)
    assert client.post("/api/v1/runs/none/commands", json={"kind": "stacks"}).status_code == 404
    for _ in range(commands.MAX_OPEN):
        node.ask(kind="stacks", ranks=[0])
    assert "are open" in node.ask(409, kind="stacks", ranks=[0])["error"]["what"]
    assert len(node.get("/commands")["commands"]) == commands.MAX_OPEN


def test_a_profile_is_of_one_rank_per_node_and_dead_ranks_refuse(node: Node) -> None:
    end = schema.RankEnded(attempt=0, rank=0, time_ns=NOW, reason="signal", signal=9)
    assert [rank["rank"] for rank in node.ask(kind="profile")["ranks"]] == [0, 2]
    node.take(end)
    assert [rank["rank"] for rank in node.ask(kind="profile")["ranks"]] == [1, 2]
    made = node.ask(kind="stacks", ranks=[0, 1])
    assert node.states(made) == {0: "refused", 1: "pending"}


def test_all_ranks_switch_before_the_same_later_step(node: Node) -> None:
    node.take(*(state(rank, step=40 + rank) for rank in range(4)))
    made = node.ask(kind="agent_off")
    assert made["at_step"] > 43
    (command,) = node.take(state(0, step=50))
    assert (command["at_step"], command["is_everyone"]) == (made["at_step"], True)
    node.ask(kind="agent_off", ranks=[1])
    assert [one.get("is_everyone", False) for one in node.take(state(1, step=51))] == [True, False]


def test_a_trace_comes_in_parts_and_only_where_it_was_asked_for(
    node: Node, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TRACES_KEPT", 2)
    packed = gzip.compress(b'{"traceEvents": []}' * 1000)

    def put(command: int, rank: int, offset: int, part: bytes, total: int = len(packed)) -> int:
        address = f"/api/v1/runs/run/commands/{command}/ranks/{rank}/trace"
        query = {"offset": offset, "total": total}
        return int(client.post(address, params=query, content=part).status_code)

    asked = [node.ask(kind="profile", ranks=[1])["id"] for _ in range(3)]
    stacks = node.ask(kind="stacks", ranks=[1])["id"]
    address = f"/api/v1/runs/run/commands/{asked[0]}/ranks/1/trace"
    assert put(stacks, 1, 0, packed) == put(asked[0], 2, 0, packed) == put(99, 1, 0, packed) == 404
    assert put(asked[0], 1, 5, packed) == 422
    assert put(asked[0], 1, 0, b"x", total=schema.MAX_TRACE_BYTES + 1) == 422
    assert put(asked[0], 1, 0, packed[:50]) == 200
    assert client.get(address).status_code == 404  # not whole yet
    for _ in range(2):  # a part that is sent twice is there once
        assert put(asked[0], 1, 50, packed[50:]) == 200
    got = client.get(address)
    assert got.content == packed
    assert "attachment" in got.headers["content-disposition"]
    operator = schema.OperatorTime(name="aten::mm", category="cpu_op", count=2, total_ns=3_000_000)
    node.take(answer(asked[0], 1, "done", trace_bytes=len(packed), operators=[operator]))
    (shown,) = node.get(f"/commands/{asked[0]}")["ranks"]
    assert shown["trace"] == address.removeprefix("/")
    assert shown["operators"] == [
        {"name": "aten::mm", "category": "cpu_op", "count": 2, "total_ms": 3.0, "self_ms": None}
    ]
    for later in asked[1:]:
        assert put(later, 1, 0, packed) == 200
    assert client.get(address).status_code == 404  # newer ones took its place
    assert node.get(f"/commands/{asked[0]}")["ranks"][0]["trace"] is None


def test_a_finding_asks_three_times_with_pauses_and_stops_when_told(
    node: Node, client: TestClient
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    clock = [time.time_ns()]

    def ask(finding: int, ranks: list[int], after_seconds: int) -> int | None:
        clock[0] += after_seconds * 10**9

        def work(unit: Any) -> int | None:
            unit.now_ns = clock[0]
            return ask_for_stacks(unit, "run", finding, ranks)

        return service.writer.run(work)

    made = [ask(1, [1], after) for after in (0, 5, 5, 20, 10, 60, 600)]
    assert [number is not None for number in made] == [True, False, True, False, True, False, False]
    first = ask(2, [1, 2], 0)
    node.take(answer(first or 0, 1, "done", reason="this incident's stacks were taken already"))
    second = ask(2, [1, 2], 60)
    assert node.states({"id": second}) == {2: "expired" if clock[0] < time.time_ns() else "pending"}
    assert node.get(f"/commands/{first}")["asked_by"] == "finding 2"


def test_a_slow_rank_and_one_that_waits_for_it_are_sampled_some_times(
    node: Node, client: TestClient
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    clock = [time.time_ns()]

    def ask(after_seconds: int, **changes: Any) -> bool:
        clock[0] += after_seconds * 10**9
        body = {"detector": "straggler", "severity": "critical", "ranks": [2], "victims": [0, 1]}
        number, is_open = changes.pop("key", 7), changes.pop("state", "open")
        known = {(0, "key"): StoredFinding(number, is_open, body | changes, 0)}

        def work(unit: Any) -> bool:
            unit.now_ns = clock[0]
            return ask_of_the_slow(unit, "run", known)

        return service.writer.run(work)

    assert not ask(1, severity="info")
    assert not ask(1, state="recovered")
    assert not ask(1, detector="hang")
    assert not ask(1, victims=[])
    made = [ask(after) for after in (1, 1, 1, 1, *[3] * 20)]
    assert made.count(True) == STACK_SAMPLES
    assert made[:5] == [True, False, False, True, True]
    commands = node.get("/commands")["commands"]
    assert {one["asked_by"] for one in commands} == {"sampling of finding 7"}
    assert set(node.states(commands[0])) == {0, 2}
    clock[0] += 60 * 10**9
    assert ask(3, key=8, ranks=[1, 2], victims=[0])  # the slowest may be any of them
    assert set(node.states(node.get("/commands")["commands"][0])) == {0, 1, 2}


def test_the_agents_page_folds_equal_sources(client: TestClient) -> None:
    node = Node(client)
    probe = {"collectives": "probe: C++", "pipeline": "skipped: no pipeline", "x": "waits for y"}
    off = dict.fromkeys(probe, "switched off")
    for rank in range(4):
        sources = off if rank == 3 else probe
        node.take(registered(rank, sources=sources), state(rank, is_recording=rank != 2))
    node.take(
        schema.Event(
            attempt=0, rank=1, time_ns=NOW, name="thinning_changed", step=9,
            fields={"from_level": "0", "level": "3", "overhead_ratio": "0.008",
                    "budget_ratio": "0.005", "why": "agreed for all ranks",
                    "source": "kernels", "us_per_collective": "130.0"},
        ),
        schema.Loss(attempt=0, rank=0, time_ns=NOW, source="journal", reason="full", count=3),
    )  # fmt: skip
    agent = node.get("/agent")
    assert (agent["off"], agent["alone"], agent["num_ranks"]) == ([3], [2], 4)
    rows = {(row["hook"], row["state"]): row for row in agent["sources"]}
    assert rows["collectives", "used"]["ranks_text"] == "ranks 0, 1, 2"
    assert rows["pipeline", "skipped"]["reason"] == "no pipeline"
    assert rows["x", "waits"]["ranks"] == [0, 1, 2]
    assert rows["x", "off"]["ranks_text"] == "rank 3"
    (change,) = agent["changes"]
    assert (change["old"], change["overhead_ratio"]) == ("everything is recorded", 0.008)
    assert change["new"].startswith("one step in 4 is recorded whole")
    assert change["why"] == "agreed for all ranks; kernels: 130.0 us for each collective"
    assert [(row["reason"], row["count"]) for row in agent["losses"]] == [("full", 3)]
    assert agent["text"].startswith("Switched off in rank 3")


@pytest.mark.parametrize(
    ("said", "code"), [(("done", "done"), 0), (("done", "refused"), 1), (("refused", "done"), 1)]
)
def test_the_exit_code_of_ask_is_0_where_every_rank_did_it(
    said: tuple[str, str], code: int, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Through:
        """The command line's client, to the server of this test, whose node answers at once."""

        def request(
            self, method: str, path: str, body: bytes | None, headers: dict[str, str]
        ) -> HttpAnswer:
            reply = node.client.request(method, path, content=body, headers=headers)
            if method == "POST":
                for command in node.take(state(0), state(1)):
                    node.take(*(answer(command["id"], rank, said[rank]) for rank in (0, 1)))
            return HttpAnswer(reply.status_code, reply.content)

        def close(self) -> None:
            """Nothing is kept open."""

    monkeypatch.setattr(ask, "Client", lambda *_, **__: Through())
    monkeypatch.setattr(ask, "_POLL_SECONDS", 0.0)
    assert main(["ask", "stacks", node.run_id, "--ranks", "0,1"]) == code


def test_answers_of_strangers_change_nothing(node: Node, client: TestClient) -> None:
    made = node.ask(kind="stacks", ranks=[1])
    stranger = Node(client, run_id="other", producer="s")
    stranger.take(answer(made["id"], 1, "done"))
    assert node.states(made) == {1: "pending"}
    assert msgspec.json.decode(msgspec.json.encode(node.get("/commands")))["commands"][0]["is_open"]


def test_ranks_on_two_nodes_are_asked_for_the_level_that_the_neediest_wants(
    node: Node, client: TestClient
) -> None:
    look: Callable[[], None] = client.app.state.service.analysis.look_now  # type: ignore[attr-defined]
    other = Node(client, producer="node-b")
    node.take(state(0, step=40), state(1, step=41, thinning_wanted=2))
    other.take(state(2, step=40, thinning_wanted=3), state(3, step=40))
    look()
    (command,) = node.take(state(0, step=42))
    assert (command["kind"], command["level"], command["is_everyone"]) == ("thin", 3, True)
    assert command["at_step"] > 42
    (same,) = other.take(state(2, step=42))
    assert (same["id"], same["at_step"]) == (command["id"], command["at_step"])
    look()
    assert len(node.take(state(0, step=43))) == 1  # asked once
    (shown,) = node.get("/commands")["commands"]
    assert "one step in 4 is recorded whole" in shown["text"]
    assert "error" in node.ask(422, kind="thin")


def test_a_run_whose_ranks_are_on_one_node_is_its_collectors_to_ask(client: TestClient) -> None:
    node = Node(client, producer="node-a")
    node.take(*(registered(rank) for rank in range(4)))
    node.take(*(state(rank, thinning_wanted=2) for rank in range(4)))
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    assert node.take(state(0)) == []
