"""Alerts of a real server process: from a run's batches to a receiver, over kills and restarts."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rankscope.wire import schema
from tests.ports import free_port
from tests.server.conftest import ServerProcess
from tests.server.receivers import Receiver, receiving, wait_for
from tests.server.seed import seed_run, wait_until_judged

Start = Callable[..., ServerProcess]
KEY = "0123456789abcdef"
QUICK = ("--look-seconds", "0.1")


def ask(server: ServerProcess, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, method=method)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def add_channel(server: ServerProcess, url: str) -> int:
    target = {"kind": "webhook", "url": url, "signing_key": KEY}
    made: int = ask(server, "POST", "alerts/channels", {"name": "hook", "target": target})["id"]
    return made


def test_a_slow_rank_reaches_a_receiver_once_with_its_verdict_and_a_link_that_opens(
    start_server: Start,
) -> None:
    port = free_port()
    server = start_server(
        "--look-seconds", "0.1", "--port", str(port), "--public-url", f"http://127.0.0.1:{port}"
    )
    with receiving() as receiver:
        add_channel(server, receiver.url)
        seed_run(server.url, run_id="slow", steps=300, slow_factor=2.0, end=False)
        wait_until_judged(server.url)
        verdict = ask(server, "GET", "runs/slow")["verdict"]
        link = f"http://127.0.0.1:{port}/runs/slow/findings/{verdict['id']}"

        def about() -> list[Any]:
            return [one.json for one in receiver.got if one.json["link"] == link]

        found = wait_for(about, "the alert of the verdict")[0]
        assert (found["event"], found["rule"]) == ("opened", "Critical findings")
        assert found["severity"] == "critical"
        assert "Rank 2" in found["what"]
        assert found["why"]
        assert found["next"] == verdict["next"]
        with urllib.request.urlopen(link, timeout=10) as page:
            assert b"<base href" in page.read()
        add_run_that_fires(server, receiver)  # many looks later it is still one message
        assert len(about()) == 1


def test_a_restart_repeats_nothing_that_was_sent(start_server: Start) -> None:
    server = start_server(*QUICK)
    with receiving() as receiver:
        add_channel(server, receiver.url)
        seed_run(server.url, run_id="crashed", steps=60, fault="crash")
        receiver.wait(1)
        wait_for(lambda: ask(server, "GET", "alerts/status")["num_waiting"] == 0, "all is sent")
        before = len(receiver.got)
        server.end(signal.SIGTERM)
        server = start_server(*QUICK)
        wait_for(lambda: ask(server, "GET", "alerts?state=open")["alerts"], "it is still open")
        add_run_that_fires(server, receiver)
        assert len({one.json["link"] for one in receiver.got}) == len(receiver.got)
        assert before < len(receiver.got)


def add_run_that_fires(server: ServerProcess, receiver: Receiver) -> None:
    """Wait for the alert of another run: what came before it came by looks that saw the first."""
    seed_run(server.url, run_id="another", steps=60, fault="crash")
    wait_for(
        lambda: [one for one in receiver.got if one.json["run_id"] == "another"],
        "the other run's alert",
    )


def test_kills_amid_retries_lose_nothing_and_repeat_with_the_same_id(start_server: Start) -> None:
    server = start_server(*QUICK)
    with receiving() as receiver:
        receiver.plan = lambda number: 503  # it takes nothing yet
        add_channel(server, receiver.url)
        for number in range(3):
            seed_run(server.url, run_id=f"run-{number}", steps=60, fault="crash")
        wait_for(
            lambda: len(ask(server, "GET", "alerts/deliveries?state=pending")["deliveries"]) >= 3,
            "three messages that wait",
        )
        for _ in range(3):
            seen = len(receiver.got)
            receiver.wait(seen + 1)
            server.end(signal.SIGKILL)
            server = start_server(*QUICK)
        waiting = ask(server, "GET", "alerts/deliveries?state=pending")["deliveries"]
        assert len(waiting) >= 3
        assert all("HTTP 503" in one["note"] for one in waiting if one["attempts"])
        receiver.plan = None
        wait_for(lambda: ask(server, "GET", "alerts/status")["num_waiting"] == 0, "all is sent")
        ids: dict[str, set[str]] = {}
        for one in receiver.got:
            body = one.json
            ids.setdefault(f"{body['alert']} {body['event']}", set()).add(body["id"])
        assert {one.json["run_id"] for one in receiver.got} == {"run-0", "run-1", "run-2"}
        assert all(len(some) == 1 for some in ids.values())


def test_a_kill_between_sending_and_noting_it_sends_again_with_the_same_id(
    start_server: Start,
) -> None:
    server = start_server(*QUICK)
    with receiving() as receiver:
        receiver.hold = threading.Event()  # it has the message, and does not say so
        add_channel(server, receiver.url)
        seed_run(server.url, run_id="crashed", steps=60, fault="crash")
        first = receiver.wait(1)[0].json
        server.end(signal.SIGKILL)
        receiver.hold.set()
        start_server(*QUICK)
        again = wait_for(lambda: receiver.got[1:], "the same once more")[0].json
        assert again["id"] == first["id"]


class Node:
    """A collector that reports for one rank."""

    def __init__(self, server: ServerProcess, host: str, rank: int) -> None:
        self.server, self.host, self.rank, self.sequence = server, host, rank, 0

    def report(self, *more: schema.AnyRecord) -> None:
        self.sequence += 1
        now = time.time_ns()
        state = schema.RankState(
            attempt=0, rank=self.rank, time_ns=now, step=1, phase="other", phase_since_ns=now,
            heartbeat_ns=now,
        )  # fmt: skip
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id="job", producer=self.host,
            sequence=self.sequence, host=self.host, sent_ns=now,
            records=[msgspec.Raw(schema.encode(record)) for record in (*more, state)],
        )  # fmt: skip
        body = schema.encode(batch)
        request = urllib.request.Request(f"{self.server.url}/api/v1/ingest", body)
        with urllib.request.urlopen(request, timeout=30):
            pass

    def register(self) -> None:
        self.report(
            schema.RankRegistered(
                attempt=0, rank=self.rank, time_ns=time.time_ns(), world_size=2, local_rank=0,
                local_world_size=1, node_rank=self.rank, host=self.host, pid=9,
            )
        )  # fmt: skip


def test_an_agent_that_goes_silent_is_named_and_its_return_is_said(start_server: Start) -> None:
    server = start_server(*QUICK, "--silent-after-seconds", "1")
    for rule in ask(server, "GET", "alerts/rules")["rules"]:
        ask(server, "DELETE", f"alerts/rules/{rule['id']}")
    rule = {"name": "silence", "when": {"about": "silence", "seconds": 2}}
    ask(server, "POST", "alerts/rules", rule)
    nodes = [Node(server, "node-a", 0), Node(server, "node-b", 1)]
    with receiving() as receiver:
        add_channel(server, receiver.url)
        for node in nodes:
            node.register()

        def is_found(number: int, *reporting: Node) -> bool:
            for node in reporting:
                node.report()
            return len(receiver.got) >= number

        wait_for(lambda: is_found(1, nodes[0]), "node-b is named")
        silent = receiver.got[0].json
        assert silent["what"] == "The collector of node-b went silent in job"
        assert "rankscope doctor" in silent["next"]
        assert len(ask(server, "GET", "alerts?state=open")["alerts"]) == 1
        # a server that was away says nothing of who was silent meanwhile
        server.end(signal.SIGKILL)
        time.sleep(2.5)
        server = start_server(*QUICK, "--silent-after-seconds", "1")
        for node in nodes:
            node.server = server
            node.report()
        alerts = ask(server, "GET", "alerts")["alerts"]
        assert [one["what"] for one in alerts] == [silent["what"]]
        assert len(receiver.got) == 1


def test_the_dead_man_switch_stays_silent_while_the_process_is_stopped(
    start_server: Start, tmp_path: Path
) -> None:
    """Beside one that runs: it shows how long that was."""
    flags = (*QUICK, "--deadman-seconds", "0.2")
    (tmp_path / "beside").mkdir()
    with (
        receiving() as receiver,
        closing(
            ServerProcess(
                tmp_path / "beside", *flags, RANKSCOPE_SERVER_DEADMAN_URL=f"{receiver.url}/running"
            )
        ) as beside,
    ):
        server = start_server(*flags, RANKSCOPE_SERVER_DEADMAN_URL=f"{receiver.url}/stopped")
        beside.start()

        def pings(name: str) -> int:
            return [one.path for one in receiver.got].count(f"/{name}")

        def wait_for_pings(name: str, number: int) -> None:
            end = pings(name) + number
            wait_for(lambda: pings(name) >= end, f"{number} more requests to /{name}")

        wait_for_pings("stopped", 2)
        assert server.process is not None
        stopped = psutil.Process(server.process.pid)
        stopped.suspend()
        try:
            wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, "a stopped process")
            wait_for_pings("running", 2)  # what was on its way before has come
            before = pings("stopped")
            wait_for_pings("running", 5)
            assert pings("stopped") == before
        finally:
            stopped.resume()
        wait_for_pings("stopped", 2)


def test_a_receiver_that_does_not_answer_holds_up_no_end(start_server: Start) -> None:
    server = start_server(*QUICK)
    with receiving() as receiver:
        receiver.hold = threading.Event()
        add_channel(server, receiver.url)
        seed_run(server.url, run_id="crashed", steps=60, fault="crash")
        receiver.wait(1)
        assert server.end(signal.SIGTERM, timeout=10.0) < 8.0
        assert server.process is not None
        assert server.process.returncode == 0
