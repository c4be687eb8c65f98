"""Requests that OpenAPI allows, and that it does not: no failure of ours, answers as declared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from tests.server.conftest import Sender, TestClient, poster
from tests.server.seed import seed_with

BASE = "http://127.0.0.1:8787"
CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
ENDLESS = "GET /api/v1/stream"
OF_OPENTELEMETRY = {f"POST /v1/{signal}" for signal in ("traces", "logs", "metrics")}


@schemathesis.serializer("application/msgpack", "application/gzip", "application/x-protobuf")
def as_it_is(context: Any, value: Any) -> Any:
    return value


OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok()
        for result in schemathesis.openapi.from_dict(
            create_app(Settings()).openapi()
        ).get_all_operations()
    )
    if operation.label != ENDLESS
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server with a run in which all pages have something to show."""
    folder = tmp_path_factory.mktemp("data")
    app = create_app(Settings(data_dir=str(folder), look_seconds=3600.0))
    with TestClient(app, base_url=BASE) as client:
        Sender(client, seed_with(poster(client), steps=100, gpus=True))
        yield client


@pytest.fixture(scope="module")
def known(client: TestClient) -> dict[str, list[Any]]:
    """What exists, by the name of its part of a path."""
    (run,) = client.get("/api/v1/runs").json()["runs"]
    app: Any = client.app
    app.state.service.analysis.look_now()
    found = client.get(f"/api/v1/runs/{run['run_id']}/findings").json()["open"]
    made = client.post("/api/v1/preflight/runs", json={"num_nodes": 2}).json()
    return {
        "run": [run["run_id"]], "rank": [0, 2], "id": [finding["id"] for finding in found],
        "preflight": [made["id"]],
    }  # fmt: skip


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_declared(
    label: str, client: TestClient, known: dict[str, list[Any]]
) -> None:
    operation = OPERATIONS[label]
    chance = random.Random(label)

    def ask(case: Case) -> None:
        parts = case.path_parameters or {}
        for name in parts:
            about = "preflight" if name == "id" and "/preflight/" in label else name
            if name == "run" or (about in known and chance.random() < 0.5):
                parts[name] = chance.choice(known[about])
        asked = case.as_transport_kwargs(base_url=BASE)
        query = dict(asked.get("params") or {})
        if "wait" in query:  # for news that will not come
            query["wait"] = 0
        reply = client.request(
            asked["method"], asked["url"], params=query, json=asked.get("json"),
            content=asked.get("data"), headers=asked.get("headers"),
        )  # fmt: skip
        case.validate_response(reply, checks=CHECKS)
        if reply.status_code in (400, 422):
            if label in OF_OPENTELEMETRY:  # its errors have a form of their own
                assert b"not a request to export" in reply.content
                return
            failed = reply.json()["error"]
            assert failed["field"], failed
            assert failed["remedy"], failed

    bounded = settings(
        max_examples=8, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        deadline=None, derandomize=True, database=None,
    )  # fmt: skip
    bounded(given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))(ask))()
    with contextlib.suppress(Unsatisfiable):  # where nothing can be wrong
        bounded(given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))(ask))()
