"""What ingest may rely on, whichever way batches take into the store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rankscope.wire import zstd
from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from tests.server.commands_sent import Node, registered, state
from tests.server.conftest import Sender, TestClient, log_line, new_data, wait_until
from tests.server.nats_servers import NatsServers
from tests.server.seed import seed_with

pytestmark = [pytest.mark.needs("postgres")]
KINDS = ("direct, sqlite", "direct, postgresql", "jetstream")
_names = itertools.count()


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    servers = NatsServers(tmp_path_factory.mktemp("nats"))
    try:
        yield servers.start()
    finally:
        servers.close()


@dataclass
class Way:
    """A server in this process with one way into its store."""

    client: TestClient
    settings: Settings

    def sender(self, run_id: str = "run", producer: str = "p") -> Sender:
        return Sender(self.client, run_id, producer)

    def watermark(self, sender: Sender) -> Any:
        asked = {"run_id": sender.run_id, "producer": sender.producer, "held_from": 1}
        reply = self.client.get("/api/v1/ingest/watermark", params=asked)
        assert reply.status_code == 200, reply.text
        return reply.json()["watermark"]

    def wait(self, *senders: Sender) -> None:
        """Wait until all that they sent is stored."""
        for one in senders:
            wait_until(lambda one=one: self.watermark(one)["durable"] == one.sequence)  # type: ignore[misc]

    def rows(self, *columns: Any) -> list[tuple[Any, ...]]:
        with self.client.app.state.service.read() as connection:  # type: ignore[attr-defined]
            found = connection.execute(sa.select(*columns).order_by(*columns))
            return [tuple(row) for row in found]


@pytest.fixture(params=KINDS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    url, more = "", {}
    if "sqlite" not in request.param:
        url = request.getfixturevalue("postgres").create_migrated()
    if request.param == "jetstream":
        servers: NatsServers = request.getfixturevalue("nats")
        more = {
            "nats_url": servers.url, "log_name": f"test-{next(_names)}", "log_partitions": 2,
            "log_partition_bytes": 16 << 20,
        }  # fmt: skip
    settings = Settings(
        data_dir=new_data(tmp_path / "data", url), database_url=url, look_seconds=0.1,
        disk_reserve_bytes=0, **more,
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        wait_until(lambda: client.get("/api/v1/ready").status_code == 200)
        yield Way(client, settings)


def test_a_batch_is_stored_once_however_often_it_comes(way: Way) -> None:
    sender = way.sender()
    body = sender.body(log_line("once"))
    answers = [way.client.post("/api/v1/ingest", content=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    said = [(one["duplicate"], one["accepted_records"]) for one in (a.json() for a in answers)]
    assert said == [(False, 1), (True, 0), (True, 0)]
    way.wait(sender)
    assert sender.get("/logs")["total"] == 1
    assert sender.get("")["counts"]["log_lines"] == 1
    assert way.rows(tables.batch.c.sequence) == [(1,)]


def test_two_runs_with_a_producer_of_the_same_name_are_two(way: Way) -> None:
    senders = [way.sender("one"), way.sender("another"), way.sender("third")]
    for sender in senders:
        assert sender.send(log_line("a line"))["duplicate"] is False
    way.wait(*senders)
    assert [sender.get("/logs")["total"] for sender in senders] == [1, 1, 1]


def test_what_is_sent_in_an_order_is_stored_in_it(way: Way) -> None:
    senders = [way.sender(f"run-{number % 2}", f"p{number}") for number in range(4)]

    def send(sender: Sender) -> None:
        for number in range(20):
            sender.send(log_line(f"line {number}"))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    way.wait(*senders)
    batch = tables.batch.c
    rows = way.rows(batch.id, batch.producer_id, batch.sequence)
    by_producer: dict[int, list[int]] = {}
    for _, producer, sequence in rows:
        by_producer.setdefault(producer, []).append(sequence)
    assert list(by_producer.values()) == [list(range(1, 21))] * 4


def test_what_cannot_be_stored_of_a_batch_is_counted_and_the_rest_is_stored(way: Way) -> None:
    sender = way.sender()
    sender.send(log_line("good"), {"kind": "weather", "rank": 0}, log_line("too"))
    sender.send(log_line("behind it"))
    way.wait(sender)
    assert way.watermark(sender)["refused"] == 1
    found = sender.get("")
    assert (found["coverage"]["refused"], found["counts"]["log_lines"]) == (1, 3)
    assert "rankscope_ingest_refused_total 1.0" in way.client.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"noise", {}, 400),
        (b"noise", {"Content-Encoding": "br"}, 415),
        (b"noise", {"Content-Encoding": "zstd"}, 400),
        (zstd.pack(b"\0" * (65 << 20)), {"Content-Encoding": "zstd"}, 413),
        (Sender(None).body(schema_version=99), {}, 422),  # type: ignore[arg-type]
        (Sender(None).body(run_id="a/b"), {}, 400),  # type: ignore[arg-type]
        (Sender(None).body(sequence=0), {}, 400),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_batch_is_refused_at_once(
    way: Way, body: bytes, headers: dict[str, str], status: int
) -> None:
    reply = way.client.post("/api/v1/ingest", content=body, headers=headers)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["remedy"]


def test_a_run_that_was_deleted_takes_no_batch(way: Way) -> None:
    sender = way.sender()
    sender.send(log_line("old"))
    way.wait(sender)
    over = tables.run.c
    with way.client.app.state.service.writer._engine.begin() as connection:  # type: ignore[attr-defined]
        connection.execute(sa.update(tables.run).where(over.run_id == "run").values(received_ns=1))
    reply = way.client.request("DELETE", "/api/v1/runs/run", params={"confirm": "run"})
    assert reply.status_code < 300, reply.text

    def answer() -> int:
        return way.client.post("/api/v1/ingest", content=sender.body(log_line("late"))).status_code

    wait_until(lambda: answer() == 410)
    assert way.rows(tables.run.c.run_id) == []


def test_what_is_asked_of_ranks_comes_with_an_answer(way: Way) -> None:
    node = Node(way.client)
    node.take(registered(0), state(0))
    way.wait(node)
    node.ask(kind="stacks", ranks=[0])

    def asked() -> list[str]:
        return [command["kind"] for command in node.take(state(0))]

    wait_until(lambda: asked() == ["stacks"])


def test_the_verdict_is_the_same(way: Way) -> None:
    def send(body: bytes) -> None:
        reply = way.client.post(
            "/api/v1/ingest", content=body, headers={"Content-Encoding": "zstd"}
        )
        assert reply.status_code == 200, reply.text

    run_id = seed_with(send, steps=100, ranks=4)

    def found() -> Any:
        answer = way.client.get(f"/api/v1/runs/{run_id}").json()
        return (
            (answer.get("verdict") or {}).get("ranks"),
            answer.get("coverage", {}).get("refused"),
        )

    wait_until(lambda: found() == ([2], 0))
