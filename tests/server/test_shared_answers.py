"""What many ask about a run at once is answered once, and never to who may not see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_server.api import shared_answers
from rankscope_server.api.app import create_app
from rankscope_server.api.runs import queries
from rankscope_server.broker import MIN_PAUSE_SECONDS, Broker
from rankscope_server.settings import Settings
from tests.server.conftest import Sender, TestClient, log_line, poster
from tests.server.seed import seed_with

OPERATOR = "operator of everything"
MANY = 400  # whose hints are 10 s apart


@pytest.fixture
def asked(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the runs that were read from the store, one for each answer that was made."""
    seed_with(poster(client), run_id="r", ranks=2, steps=20, fault="none")
    found: list[str] = []
    read: Callable[..., Any] = queries.run_row

    def noted(connection: Any, run_id: str) -> Any:
        found.append(run_id)
        return read(connection, run_id)

    monkeypatch.setattr("rankscope_server.api.overview.queries.run_row", noted)
    deadline = time.monotonic() + 20
    while broker(client)._pending:  # hints of what was stored are on their way
        assert time.monotonic() < deadline
        time.sleep(0.05)
    broker(client).subscribers = MANY
    return found


def broker(client: TestClient) -> Any:
    return client.app.state.service.broker  # type: ignore[attr-defined]


def test_one_answer_serves_all_until_a_hint(client: TestClient, asked: list[str]) -> None:
    first, second = client.get("/api/v1/runs/r"), client.get("/api/v1/runs/r")
    assert first.json() == second.json()
    assert asked == ["r"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    held = client.get("/api/v1/runs/r", headers={"If-None-Match": first.headers["etag"]})
    assert (held.status_code, held.content) == (304, b"")
    assert client.get("/api/v1/runs/r?format=xml").status_code == 422  # another question
    asked.clear()
    broker(client)._sent["run:r"] = float("inf")  # a hint goes out
    client.get("/api/v1/runs/r")
    assert asked == ["r"]


def test_where_few_listen_every_answer_is_of_now(client: TestClient, asked: list[str]) -> None:
    broker(client).subscribers = shared_answers.FEW
    for _ in range(2):
        assert client.get("/api/v1/runs/r").status_code == 200
    assert asked == ["r", "r"]


def test_what_a_request_changed_is_seen_by_the_next(client: TestClient, asked: list[str]) -> None:
    assert client.get("/api/v1/runs/r").json()["run"]["tags"] == {"model": "gpt-nano"}
    assert client.put("/api/v1/runs/r/pin").status_code == 200
    client.get("/api/v1/runs/r")
    assert asked == ["r", "r"]
    Sender(client, run_id="r").send()  # a batch is no such change: a hint says what it brought
    client.get("/api/v1/runs/r")
    assert asked == ["r", "r"]


def test_a_failure_is_not_kept(client: TestClient, asked: list[str]) -> None:
    for _ in range(2):
        reply = client.get("/api/v1/runs/none")
        assert reply.status_code == 404
        assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
    assert asked == ["none", "none"]


def test_who_sees_less_is_not_served_with_what_others_see(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), token=OPERATOR, look_seconds=3600.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        all_projects = {"Authorization": f"Bearer {OPERATOR}"}
        asked = {"name": "other", "roles": ["read"], "project": "other"}
        made = client.post("/api/v1/tokens", json=asked, headers=all_projects).json()
        body = Sender(client, run_id="r").body(log_line("mine"))
        assert client.post("/api/v1/ingest", content=body, headers=all_projects).is_success
        broker(client).subscribers = MANY
        other = {"Authorization": f"Bearer {made['token']}"}
        for headers, status in ((all_projects, 200), (other, 404), ({}, 401), (all_projects, 200)):
            assert client.get("/api/v1/runs/r", headers=headers).status_code == status


def test_the_more_listen_the_longer_the_pause_between_hints() -> None:
    broker = Broker()
    broker.subscribers = 4
    assert broker.pause_seconds == MIN_PAUSE_SECONDS
    broker.subscribers = 200
    for now, number in ((100.0, 1), (104.0, 1), (105.1, 2)):
        broker.publish("run:r", {"steps"}, None)
        broker._flush(now)
        assert broker.last == number
        assert broker.hinted_at("run:r") == (100.0 if number == 1 else 105.1)
