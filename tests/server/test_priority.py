"""Where ranks are and how they ended goes past bulk that waits, and is taken where that is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from rankscope.wire import schema
from rankscope_server.store.writer import Writer
from tests.server.conftest import Sender, TestClient, log_line

STATE = schema.RankState(
    attempt=0, rank=3, time_ns=5, step=7, phase="forward", phase_since_ns=0, heartbeat_ns=5
)
VITALS = {schema.VITALS_HEADER: "1"}


def writer_of(client: TestClient) -> Writer:
    found: Writer = client.app.state.service.writer  # type: ignore[attr-defined]
    return found


@contextmanager
def held(client: TestClient, num_waiting: int) -> Iterator[None]:
    """Hold the writer while so many jobs wait; they are done after the block."""
    writer, gate, began = writer_of(client), threading.Event(), threading.Event()
    writer.submit(lambda unit: (began.set(), gate.wait(20)))
    assert began.wait(5)
    while writer.num_waiting:  # what came with it is in its group
        time.sleep(0.01)
    try:
        for _ in range(num_waiting):
            writer.submit(lambda unit: None)
        yield
    finally:
        gate.set()


def post(client: TestClient, body: bytes, headers: dict[str, str]) -> httpx.Response:
    return client.post("/api/v1/ingest", content=body, headers=headers)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_vitals_are_stored_before_what_waits_and_where_bulk_is_put_off(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    bulk, vitals = Sender(client), Sender(client, producer="vitals")
    bulk.send(log_line("the run is there"))
    monkeypatch.setattr(writer_of(client), "_waiting", 3)
    with ThreadPoolExecutor(1) as pool:
        with held(client, 3):
            refused = post(client, bulk.body(log_line("later")), {})
            assert refused.status_code == 503
            assert "the store is behind" in refused.text
            assert refused.headers["retry-after"]
            stored = pool.submit(post, client, vitals.body(STATE), VITALS)
            while writer_of(client).num_waiting < 4:
                time.sleep(0.01)
        answer = stored.result(20)
    assert (answer.status_code, answer.json()["accepted_records"]) == (200, 1)
    steps = {one["rank"]: one["step"] for one in bulk.get("/ranks")["ranks"]}
    assert steps[3] == 7


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_is_large_is_no_vitals(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = Sender(client)
    bulk.send(log_line("the run is there"))
    monkeypatch.setattr(writer_of(client), "_waiting", 1)
    large = bulk.body(log_line("x" * 60_000), *(log_line("y" * 60_000) for _ in range(5)))
    assert len(large) > schema.MAX_VITALS_BYTES
    with held(client, 1):
        assert post(client, large, VITALS).status_code == 503


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_waits_is_done_in_the_order_of_its_urgency(client: TestClient) -> None:
    writer, order = writer_of(client), list[int]()
    with held(client, 0):
        futures = [
            writer.submit(lambda unit, n=number: order.append(n), is_urgent=number % 2 == 1)
            for number in range(6)
        ]
    for future in futures:
        future.result(5)
    assert order == [1, 3, 5, 0, 2, 4]
