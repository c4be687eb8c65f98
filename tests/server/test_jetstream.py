"""The log in NATS: servers that die, disks that are lost, owners that sleep."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import sqlalchemy as sa

from rankscope.wire.schema import HELD_HEADER
from rankscope_server.api.app import create_app
from rankscope_server.batch_log.interface import Appended
from rankscope_server.batch_log.partitions import assign, lease_of, partition_of
from rankscope_server.otlp import taking
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.leases import Held, LeaseLostError
from tests.server.conftest import Sender, TestClient, log_line, new_data, wait_until
from tests.server.nats_servers import NUM_SERVERS, NatsServers

MORE = {"log_partitions": 2, "log_partition_bytes": 1 << 20}


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServers]:
    servers = NatsServers(tmp_path / "nats")
    try:
        yield servers.start()
    finally:
        servers.close()


@pytest.fixture
def client(
    tmp_path: Path, nats: NatsServers, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    url = request.getfixturevalue("postgres").create_migrated()
    settings = Settings(
        data_dir=new_data(tmp_path / "data", url), database_url=url, look_seconds=3600.0,
        disk_reserve_bytes=0, nats_url=nats.url, **MORE,  # type: ignore[arg-type]
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        wait_until(lambda: client.get("/api/v1/ready").status_code == 200)
        yield client


def watermark(sender: Sender, held_from: int = 1) -> Any:
    asked = {"run_id": sender.run_id, "producer": sender.producer, "held_from": held_from}
    return sender.client.get("/api/v1/ingest/watermark", params=asked).json()["watermark"]


def wait_stored(sender: Sender) -> None:
    wait_until(lambda: watermark(sender)["durable"] == sender.sequence)


def send_until_taken(sender: Sender) -> int:
    """Send a batch as a collector does; return how often it was put off."""
    body, put_off = sender.body(log_line(f"line {sender.sequence}")), 0

    def is_taken() -> bool:
        nonlocal put_off
        reply = sender.client.post("/api/v1/ingest", content=body)
        assert reply.status_code in (200, 503), reply.text
        put_off += reply.status_code == 503
        return reply.status_code == 200

    wait_until(is_taken)
    return put_off


@pytest.mark.needs("postgres")
def test_without_most_servers_batches_are_put_off_and_reading_goes_on(
    client: TestClient, nats: NatsServers
) -> None:
    sender = Sender(client)
    send_until_taken(sender)
    wait_stored(sender)
    nats.signal(0, signal.SIGKILL)  # one of three: others go on, after a moment
    send_until_taken(sender)
    nats.signal(1, signal.SIGKILL)
    body = sender.body(log_line("put off"))
    reply = client.post("/api/v1/ingest", content=body)
    assert reply.status_code == 503, reply.text
    assert int(reply.headers["Retry-After"]) > 0
    assert "the log takes no batches now" in reply.json()["error"]["what"]
    assert sender.get("/logs")["total"] >= 1
    assert 'rankscope_unavailable_total{cause="log"} 1.0' in client.get("/metrics").text
    for number in (0, 1):
        nats.start_one(number)
    wait_until(lambda: client.post("/api/v1/ingest", content=body).status_code == 200)
    wait_stored(sender)
    assert sender.get("/logs")["total"] == 3


def sent_by_opentelemetry(client: TestClient, text: str) -> Any:
    """Send a line by OpenTelemetry's protocol, which knows no watermark."""
    about = [{"key": "rankscope.run", "value": {"stringValue": "run"}}]
    records = [{"timeUnixNano": "1790000000000000000", "body": {"stringValue": text}}]
    resource = {"resource": {"attributes": about}, "scopeLogs": [{"logRecords": records}]}
    return client.post("/v1/logs", json={"resourceLogs": [resource]})


@pytest.mark.needs("postgres")
def test_what_opentelemetry_sends_is_answered_when_it_is_stored(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter forgets what was answered: the log alone is not enough."""
    sender = Sender(client)
    for number in range(3):
        assert sent_by_opentelemetry(client, f"line {number}").status_code == 200
        assert sender.get("/logs")["total"] == number + 1
    service = client.app.state.service  # type: ignore[attr-defined]
    monkeypatch.setattr(taking, "_DURABLE_SECONDS", 0.2)
    with monkeypatch.context() as patch:  # what is accepted, and lost before any worker reads it
        appended = Appended(duplicate=False, is_durable=False)
        patch.setattr(type(service.log), "append", AsyncMock(return_value=appended))
        reply = sent_by_opentelemetry(client, "lost")
        assert (reply.status_code, reply.json()["code"]) == (503, 14)
        assert int(reply.headers["Retry-After"]) > 0
    wait_until(lambda: sent_by_opentelemetry(client, "lost").status_code == 200)
    assert sent_by_opentelemetry(client, "lost").status_code == 200
    assert sender.get("/logs")["total"] == 4
    assert sender.get("")["coverage"]["missing_batches"] == 0


@pytest.mark.needs("postgres")
def test_where_all_disks_are_lost_the_log_begins_anew_and_repeats_fill_the_gap(
    client: TestClient, nats: NatsServers
) -> None:
    sender = Sender(client)
    for _ in range(3):
        send_until_taken(sender)
    wait_stored(sender)
    for number in range(NUM_SERVERS):
        nats.signal(number, signal.SIGKILL)
        nats.lose_disk(number)
    for number in range(NUM_SERVERS):
        nats.start_one(number)
    sender.sequence = 4  # the fourth was accepted and is lost
    send_until_taken(sender)
    wait_until(lambda: watermark(sender, 4)["newest"] == 5)
    assert watermark(sender, 4)["durable"] == 3
    sender.sequence = 3
    body = sender.body(log_line("line 4"))
    reply = client.post("/api/v1/ingest", content=body, headers={HELD_HEADER: "4"})
    assert reply.status_code == 200, reply.text
    sender.sequence = 5
    wait_stored(sender)
    assert sender.get("/logs")["total"] == 5


@pytest.mark.needs("postgres")
def test_a_full_log_takes_no_batch_and_loses_none(client: TestClient, nats: NatsServers) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    sender, big = Sender(client), "x" * 60_000
    with service.writer._engine.connect() as blocking:  # the store is busy: nothing leaves the log
        blocking.exec_driver_sql("LOCK TABLE batch IN ACCESS EXCLUSIVE MODE")
        statuses = []
        for number in range(40):
            body = sender.body(log_line(big + str(number)))
            statuses.append(client.post("/api/v1/ingest", content=body).status_code)
            if statuses[-1] != 200:
                break
    assert statuses[-1] == 503
    assert set(statuses[:-1]) == {200}
    sender.sequence -= 1
    wait_stored(sender)
    assert sender.get("/logs")["total"] == len(statuses) - 1


@pytest.mark.needs("postgres")
def test_an_owner_that_slept_writes_nothing(client: TestClient) -> None:
    sender = Sender(client)
    send_until_taken(sender)
    wait_stored(sender)
    service = client.app.state.service  # type: ignore[attr-defined]
    name, lease = lease_of(partition_of("run", 2)), tables.lease
    engine = service.writer._engine
    with engine.connect() as connection:
        row = connection.execute(sa.select(lease).where(lease.c.name == name)).one()
    assert row.applied > 0
    slept = Held(name, row.owner, row.epoch - 1)
    with pytest.raises(LeaseLostError), engine.begin() as connection:
        slept.advance(connection, row.applied + 5)
    with engine.connect() as connection:
        after = connection.execute(sa.select(lease).where(lease.c.name == name)).one()
    assert after.applied == row.applied


@pytest.mark.needs("postgres")
def test_a_batch_that_a_defect_keeps_out_holds_up_no_other(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankscope_server.batch_log import storing

    stored = storing.store_batch

    def store_batch(unit: Any, batch: Any, journal: Any) -> Any:
        if batch.sequence == 2 and batch.records:
            raise ArithmeticError("a defect of ours")
        return stored(unit, batch, journal)

    monkeypatch.setattr(storing, "store_batch", store_batch)
    sender = Sender(client)
    for _ in range(3):
        send_until_taken(sender)
    wait_stored(sender)
    assert watermark(sender)["refused"] == 1
    assert sender.get("/logs")["total"] == 2


def test_partitions_are_shared_evenly_and_few_move() -> None:
    for workers in (1, 2, 3, 5, 16):
        names = [f"w{number}" for number in range(workers)]
        given = assign(16, names)
        assert sorted(number for some in given.values() for number in some) == list(range(16))
        sizes = [len(some) for some in given.values()]
        assert max(sizes) <= -(-16 // workers)
        assert assign(16, names) == given
    before, after = assign(16, ["a", "b", "c"]), assign(16, ["a", "b", "c", "d"])
    kept = sum(len(before[name] & after[name]) for name in before)
    assert kept >= 8
    assert assign(16, []) == {}
