"""What an operator relies on: readiness by part, a log that machines read, an end in time."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from tests.server.conftest import Sender, ServerProcess, TestClient, poster
from tests.server.receivers import wait_for
from tests.server.seed import seed_with

Start = Callable[..., ServerProcess]


def test_every_part_is_ready(client: TestClient) -> None:
    answer = client.get("/api/v1/ready").json()
    assert answer["status"] == "ok"
    assert {part["part"] for part in answer["parts"]} == {
        "disk", "reading", "writing", "blobs", "analysis", "retention", "alerts",
    }  # fmt: skip
    assert all(part["ready"] and part["reason"] == "" for part in answer["parts"])


def test_the_server_says_how_it_is(client: TestClient) -> None:
    answer = client.get("/api/v1/server").json()
    assert (answer["text"], answer["is_well"]) == ("Every part works; no run is live", True)
    seed_with(poster(client), run_id="r", ranks=4, steps=20, fault="none", end=False)
    lost = schema.Loss(
        attempt=0, rank=1, source="collectives", reason="ring full", count=7, time_ns=1
    )
    thinned = {"level": "3", "every": "4", "overhead_ratio": "0.02", "budget_ratio": "0.01"}
    Sender(client, run_id="r").send(
        lost,
        schema.Event(attempt=0, rank=2, time_ns=1, step=9, name="thinning_changed", fields=thinned),
    )
    answer = client.get("/api/v1/server").json()
    assert not answer["is_well"]
    assert "1 of 1 live run has lost records" in answer["text"]
    (run,) = answer["runs"]
    assert (run["expected"], run["reporting"], run["silent"], run["lost"]) == (4, 4, 0, 7)
    assert run["thinning"].startswith("one step in 4 is recorded whole")
    assert (run["overhead_ratio"], run["budget_ratio"]) == (0.02, 0.01)
    figures = {one["name"]: one["value"] for one in answer["figures"] if not one["kind"]}
    exposed = client.get("/metrics").text
    assert all(f"\n{name} " in exposed for name in figures)
    assert figures["rankscope_ingest_records_total"] > 4


@pytest.mark.parametrize("part", ["writing", "reading", "retention", "analysis", "alerts"])
def test_the_part_that_is_not_ready_is_named(client: TestClient, part: str) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    if part == "writing":
        service.writer.close()
    elif part == "reading":
        sa.event.listen(service.reader, "checkout", no_connection)
    else:
        getattr(service, part).close()
    reply = client.get("/api/v1/ready")
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    what = reply.json()["error"]["what"]
    assert what.startswith("not ready: ")
    assert what.removeprefix("not ready: ").startswith(part)


def no_connection(*_: Any) -> Any:
    raise OSError("unable to open database file")


def test_the_log_is_json_with_the_id_of_each_request(start_server: Start) -> None:
    server = start_server("--log-format", "json", "--log-level", "info")
    url = f"{server.url}/api/v1"
    httpx.get(f"{url}/runs?q=secret-word", headers={"X-Request-Id": "my-request-1"})
    bad = httpx.post(f"{url}/ingest", content=b"?")
    assert bad.status_code == 400
    server.end(signal.SIGTERM)
    lines = [json.loads(line) for line in server.output().splitlines() if line.startswith("{")]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(one) for one in lines))
    requests = {line["request_id"]: line for line in lines if line.get("path")}
    mine = requests["my-request-1"]
    assert (mine["method"], mine["path"], mine["status"]) == ("GET", "/api/v1/runs", 200)
    assert mine["duration_ms"] > 0
    assert requests[bad.json()["error"]["request_id"]]["status"] == 400
    assert "secret-word" not in json.dumps(lines)
    assert any("Shutting down" in line["message"] for line in lines)  # uvicorn's in the same form


def test_a_failure_is_logged_with_the_id_that_the_answer_names(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("rankscope_server.api.runs.routes.list_runs", broken)
    quiet = TestClient(client.app, base_url="http://127.0.0.1:8787", raise_server_exceptions=False)
    reply = quiet.get("/api/v1/runs")
    assert reply.status_code == 500
    identity = reply.json()["error"]["request_id"]
    assert [record for record in caplog.records if identity in record.getMessage()]


def _queue_bytes(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    (found,) = re.findall(r"^rankscope_queue_bytes (\S+)$", text, re.M)
    return float(found)


@pytest.mark.parametrize("seconds", [1, 4])
def test_it_ends_in_time_with_open_streams_and_a_request_that_never_comes(
    start_server: Start, seconds: int
) -> None:
    server = start_server("--shutdown-seconds", str(seconds))
    host, port = server.url.removeprefix("http://").split(":")
    stream = socket.create_connection((host, int(port)))
    stream.settimeout(30)
    stream.sendall(b"GET /api/v1/stream?topics=runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"text/event-stream" in stream.recv(4096)
    slow = socket.create_connection((host, int(port)))
    slow.sendall(b"POST /api/v1/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nx")
    wait_for(lambda: _queue_bytes(server.url) > 0, "a body that is being read")
    took = server.end(signal.SIGTERM, timeout=30)
    assert server.process is not None
    assert server.process.returncode == 0
    assert took < seconds + 3.5  # threads, and the store
    rest = b""
    while part := stream.recv(4096):
        rest += part
    # An end in order: the browser's reader takes it up again, at the pause that it was told.
    assert rest.endswith(b"0\r\n\r\n")
    assert b"event: stopping\n" in rest
    answered = slow.recv(4096)
    assert answered.startswith(b"HTTP/1.1 503 ")
    assert b"the server is stopping" in answered
    stream.close()
    slow.close()
    assert "Traceback" not in server.output()


def test_a_stream_is_taken_up_at_the_next_server(start_server: Start) -> None:
    first = start_server()
    port = first.url.rpartition(":")[2]
    with httpx.stream("GET", f"{first.url}/api/v1/stream?topics=runs", timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 2000"
        first.end(signal.SIGTERM)
        assert "event: stopping" in list(lines)
    second = start_server("--port", port)
    assert second.url == first.url
    headers = {"Last-Event-ID": "0badcafe-3"}
    with httpx.stream("GET", f"{second.url}/api/v1/stream?topics=runs", headers=headers) as reply:
        begun = itertools.islice(reply.iter_lines(), 4)
        assert "event: reload" in list(begun)


def test_a_problem_of_a_write_is_an_answer_not_a_failure(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    reply = client.put("/api/v1/runs/nothing/pin")
    assert reply.status_code == 404
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
