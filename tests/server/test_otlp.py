"""OpenTelemetry's protocol: bodies, answers and errors as it says, and each thing stored once."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rankscope.wire import schema
from rankscope_server.api.app import create_app
from rankscope_server.otlp.names import named
from rankscope_server.settings import Settings
from rankscope_server.store.engine import StoreUnavailableError
from tests.server.conftest import Sender, TestClient, serving

NOW = 1_790_000_000 * 10**9
MS = 1_000_000
PROTOBUF = {"Content-Type": "application/x-protobuf"}
Attributes = dict[str, Any]


def attributes(values: Attributes) -> list[dict[str, Any]]:
    words = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return [{"key": key, "value": {words[type(one)]: one}} for key, one in values.items()]


def span(name: str, begin_ms: int, end_ms: int, **more: Any) -> dict[str, Any]:
    values = more.pop("values", {})
    return {
        "name": name, "startTimeUnixNano": str(NOW + begin_ms * MS), "traceId": "ab" * 16,
        "endTimeUnixNano": str(NOW + end_ms * MS), "spanId": "cd" * 8,
        "attributes": attributes(values), **more,
    }  # fmt: skip


def of_rank(rank: int, *spans: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the spans of a rank as a resource."""
    about = {"rankscope.run": "run", "rank": rank, "world_size": 2, "host.name": "node-a"} | more
    return {
        "resource": {"attributes": attributes(about)},
        "scopeSpans": [{"scope": {"name": "trainer"}, "spans": list(spans)}],
    }


def step(number: int, *, at_ms: int = -1) -> list[dict[str, Any]]:
    """Return the spans of a step of 100 ms in the order of their ends."""
    at = 100 * number if at_ms < 0 else at_ms
    return [
        span("data_loading", at, at + 10),
        span("forward", at + 10, at + 40),
        span("all_reduce", at + 60, at + 90),
        span("backward", at + 40, at + 90),
        span("optimizer_step", at + 90, at + 100),
        span("train_step", at, at + 100, values={"step": number}),
    ]


def post(client: TestClient, signal: str, *resources: dict[str, Any], **headers: str) -> Any:
    names = {"traces": "resourceSpans", "logs": "resourceLogs", "metrics": "resourceMetrics"}
    return client.post(f"/v1/{signal}", json={names[signal]: resources}, headers=headers)


def taken(client: TestClient, *resources: dict[str, Any]) -> dict[str, Any]:
    """Send spans that must be taken; return the answer."""
    reply = post(client, "traces", *resources)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with serving(tmp_path, "") as client:
        yield client


@pytest.fixture
def reader(client: TestClient) -> Sender:
    return Sender(client)


def cell(reader: Sender, number: int, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = reader.get("/cell", rank=rank, step=number)
    return found


# --- bodies and answers ------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
def test_protobuf_is_answered_with_protobuf(
    client: TestClient, reader: Sender, is_packed: bool
) -> None:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for key, value in (("rankscope.run", "run"), ("rank", "0"), ("world_size", "1")):
        resource.resource.attributes.add(key=key).value.string_value = value  # as of a variable
    spans = resource.scope_spans.add().spans
    for number in (1, 2):
        spans.add(
            name=f"iteration_{number}", trace_id=b"\xab" * 16, span_id=b"\xcd" * 8,
            start_time_unix_nano=NOW + number, end_time_unix_nano=NOW + number + 1,
        )  # fmt: skip
    body = request.SerializeToString()
    encoding = {"Content-Encoding": "gzip"} if is_packed else {}
    reply = client.post(
        "/v1/traces", content=gzip.compress(body) if is_packed else body,
        headers=PROTOBUF | encoding,
    )  # fmt: skip
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-protobuf"
    assert ExportTraceServiceResponse.FromString(reply.content) == ExportTraceServiceResponse()
    assert reader.get("")["run"]["step"] == 2


@pytest.mark.parametrize(
    ("signal", "body", "headers", "status", "code", "words"),
    [
        ("traces", b"\xff\xff", PROTOBUF, 400, 3, "not a request to export traces"),
        ("logs", b"{", {"Content-Type": "application/json"}, 400, 3, "not a request"),
        ("metrics", b'{"resourceMetrics": 3}', {"Content-Type": "application/json"}, 400, 3, ""),
        ("traces", b"no gzip", PROTOBUF | {"Content-Encoding": "gzip"}, 400, 3, "is not gzip"),
        ("traces", gzip.compress(b"x" * 99)[:-9], PROTOBUF | {"Content-Encoding": "gzip"}, 400, 3,
         "cut off"),
        ("traces", gzip.compress(bytes(100_000)), PROTOBUF | {"Content-Encoding": "gzip"}, 413, 8,
         "unpacks to more than"),
        ("traces", b"x", PROTOBUF | {"Content-Encoding": "br"}, 415, 2, "send gzip"),
        ("traces", b"x", {"Content-Type": "text/plain"}, 415, 2, "send application/x-protobuf"),
        ("traces", bytes(60_000), PROTOBUF, 413, 8, "larger than"),
    ],
    ids=["protobuf", "json", "json of another shape", "gzip", "cut off", "unpacked", "encoding",
         "type", "size"],
)  # fmt: skip
def test_what_is_bad_is_answered_with_a_status(
    tmp_path: Any, signal: str, body: bytes, headers: dict[str, str], status: int, code: int,
    words: str,
) -> None:  # fmt: skip
    settings = Settings(
        data_dir=str(tmp_path), look_seconds=3600.0, max_batch_bytes=50_000,
        max_unpacked_bytes=80_000, disk_reserve_bytes=0,
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        reply = client.post(f"/v1/{signal}", content=body, headers=headers)
    assert reply.status_code == status
    if headers["Content-Type"] == "application/json":
        found = reply.json()
        assert found["code"] == code
        assert words in found["message"]
    else:  # a google.rpc.Status: field 1 a number, field 2 a text
        assert reply.headers["content-type"] == "application/x-protobuf"
        assert reply.content[:3] == bytes([0x08, code, 0x12])
        assert words.encode() in reply.content


def test_ids_of_json_are_hexadecimal(client: TestClient, reader: Sender) -> None:
    taken(client, of_rank(0, span("something else", 0, 1)))
    (line,) = reader.get("/logs")["lines"]
    assert (line["fields"]["trace_id"], line["fields"]["span_id"]) == ("ab" * 16, "cd" * 8)
    reply = post(client, "traces", of_rank(0, span("x", 0, 1, traceId="no id")))
    assert (reply.status_code, reply.json()["code"]) == (400, 3)
    assert "not hexadecimal" in reply.json()["message"]


def test_what_has_no_run_is_refused_and_the_rest_stored(client: TestClient, reader: Sender) -> None:
    stray = of_rank(0, *step(1))
    stray["resource"]["attributes"] = attributes({"service.name": "unknown_service"})
    answer = taken(client, of_rank(0, *step(1)), stray)["partialSuccess"]
    assert answer["rejectedSpans"] == "6"
    assert "set the resource attribute rankscope.run" in answer["errorMessage"]
    assert reader.get("")["run"]["step"] == 1
    named_by_service = of_rank(0, *step(1))
    named_by_service["resource"]["attributes"] = attributes(
        {"service.name": "llama", "service.namespace": "team", "deployment.environment.name": "a b"}
    )
    taken(client, named_by_service)
    assert {one["run_id"] for one in client.get("/api/v1/runs").json()["runs"]} == {
        "run", "team.llama.a-b",
    }  # fmt: skip


def test_a_name_that_is_too_long_stays_one_of_its_own(client: TestClient) -> None:
    runs = [f"{'x' * 200}{number}" for number in range(2)]
    resources = [of_rank(0, *step(1), **{"rankscope.run": run}) for run in runs]
    assert taken(client, *resources) == {}
    assert client.get("/api/v1/runs").json()["total"] == 2


def test_spans_without_a_rank_are_lines_and_it_is_said(client: TestClient, reader: Sender) -> None:
    resource = of_rank(0, *step(1))
    resource["resource"]["attributes"] = attributes({"rankscope.run": "run"})
    answer = taken(client, resource)["partialSuccess"]
    assert answer == {"errorMessage": "6 spans without a rank, kept as lines of the run: set the "
                      "resource attribute rank (OTEL_RESOURCE_ATTRIBUTES=rank=$RANK)"}  # fmt: skip
    assert reader.get("/logs")["total"] == 6
    backwards = of_rank(0, span("forward", 5, 4))
    answer = taken(client, backwards)["partialSuccess"]
    assert answer["rejectedSpans"] == "1"


def test_a_store_that_is_full_says_when_to_come_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]

    async def no_room(*_: Any) -> Any:
        raise StoreUnavailableError("the disk is full", "free some", cause="disk")

    with monkeypatch.context() as patch:
        patch.setattr(type(service.log), "append", no_room)
        reply = post(client, "traces", of_rank(0, *step(1)))
    assert (reply.status_code, reply.json()["code"]) == (503, 14)
    assert int(reply.headers["retry-after"]) > 0
    taken(client, of_rank(0, *step(1)))  # nothing of the first time is kept
    reader = Sender(client)
    assert cell(reader, 1)["phases"]["forward"] == 30
    assert reader.get("")["coverage"]["missing_batches"] == 0


def test_a_token_may_send_to_its_project_alone(tmp_path: Any) -> None:
    settings = Settings(
        data_dir=str(tmp_path), look_seconds=3600.0, token="operator-of-all", disk_reserve_bytes=0
    )
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        reply = post(client, "traces", of_rank(0, *step(1)))
        assert (reply.status_code, reply.json()["code"]) == (401, 16)
        operator = {"Authorization": "Bearer operator-of-all"}

        def made(role: str, project: str, **more: Any) -> dict[str, str]:
            asked = {"name": f"{role} {project}", "roles": [role], "project": project, **more}
            found = client.post("/api/v1/tokens", json=asked, headers=operator).json()
            return {"Authorization": f"Bearer {found['token']}"}

        reply = post(client, "traces", of_rank(0, *step(1)), **made("read", "a"))
        assert (reply.status_code, reply.json()["code"]) == (403, 7)
        ours = made("ingest", "a", events_per_second=1)
        assert post(client, "traces", of_rank(0, *step(1)), **ours).status_code == 200
        reply = post(client, "traces", of_rank(0, *step(1)), **made("ingest", "b"))
        assert reply.status_code == 404
        many = [one for number in range(2, 12) for one in step(number)]
        assert post(client, "traces", of_rank(0, *many), **ours).status_code == 200
        reply = post(client, "traces", of_rank(0, *step(12)), **ours)
        assert (reply.status_code, reply.json()["code"]) == (429, 8)
        assert int(reply.headers["retry-after"]) > 0
        (run,) = client.get("/api/v1/runs", headers=operator).json()["runs"]
        assert (run["project"], run["step"]) == ("a", 11)


# --- each thing once ---------------------------------------------------------------------------


def test_the_same_body_again_is_stored_once(client: TestClient, reader: Sender) -> None:
    resource = of_rank(0, *step(1), span("odd", 200, 201))
    first, again = taken(client, resource), taken(client, resource)
    assert first == again == {}
    assert reader.get("/logs")["total"] == 1
    assert reader.get("")["coverage"]["missing_batches"] == 0


def test_runs_and_hosts_of_one_body_are_apart(client: TestClient) -> None:
    """As a collector between sends them, also where names begin alike."""
    runs = [f"{'a-run-with-a-long-name-' * 5}{number}" for number in range(3)]
    resources = [
        of_rank(rank, *step(1), **{"rankscope.run": run, "host.name": f"node-{rank}"})
        for run in runs
        for rank in range(2)
    ]
    assert taken(client, *resources) == {}
    for run in runs:
        found = Sender(client, run).get("")["run"]
        assert (found["step"], found["hosts"]) == (1, ["node-0", "node-1"])


def test_a_step_is_put_together_over_requests_and_servers(settings: Settings) -> None:
    """What a request leaves open is in the store: a server that starts again has it."""
    spans = step(0) + step(1) + step(2)  # this program counts from 0
    for at in range(0, len(spans), 4):
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
            taken(client, of_rank(0, *spans[at : at + 4]))
            reader = Sender(client)
            if at + 4 < len(spans):
                continue
            for number in (1, 2, 3):
                found = cell(reader, number)
                assert found["step_ms"] == 100, number
                assert found["blocked_ms"] == 30, number
                del found["phases"]["checkpoint"], found["phases"]["evaluation"]
                assert found["phases"] == {
                    "data": 10, "forward": 30, "backward": 20, "optimizer": 10, "other": 0,
                }, number  # fmt: skip
            assert reader.get("/logs")["total"] == 0


def test_a_step_begins_with_what_was_done_since_the_last_one(
    client: TestClient, reader: Sender
) -> None:
    """The next batch is asked for, and a checkpoint saved, between two spans of steps."""
    between = [span("fetch_batch", 100, 130), span("save_checkpoint", 130, 200)]
    taken(client, of_rank(0, *step(1, at_ms=0), *between, *step(2, at_ms=200)))
    found = cell(reader, 2)
    assert (found["step_ms"], found["flags"]) == (200, ["checkpoint"])
    assert (found["phases"]["data"], found["phases"]["checkpoint"]) == (40, 70)


def test_what_a_step_says_beside_its_time_is_kept(client: TestClient, reader: Sender) -> None:
    """Numbers as attributes, events in spans, and a part before the first step."""
    said = {"train.loss": 2.5, "tokens": 4096, "step": 1, "is_last": False}
    event = {"name": "rebuilt the graph", "timeUnixNano": str(NOW + 50 * MS)}
    whole = span("train_step", 100, 200, values=said, events=[event])
    answer = taken(client, of_rank(0, span("data_loading", 0, 90), whole))
    assert answer["partialSuccess"]["errorMessage"] == (
        "1 spans of no step, or of one whose end has not come, kept as lines"
    )
    assert cell(reader, 1)["step_ms"] == 100
    series = {one["name"]: (one["step"], one["value"]) for one in reader.get("/metrics")["series"]}
    assert series == {"loss": ([1], [2.5]), "tokens": ([1], [4096.0])}
    messages = sorted(line["message"] for line in reader.get("/logs")["lines"])
    assert messages == ["rebuilt the graph", "span data: 90.000 ms"]


def test_steps_in_a_step_and_late_parts(client: TestClient, reader: Sender) -> None:
    around = span("training_iteration", 0, 105)
    answer = taken(client, of_rank(0, *step(1, at_ms=0), around))
    assert answer == {}
    answer = taken(client, of_rank(0, span("forward", 20, 30)))
    assert answer["partialSuccess"]["errorMessage"] == (
        "1 spans that came after their step, kept as lines"
    )
    assert cell(reader, 1)["step_ms"] == 100
    messages = [line["message"] for line in reader.get("/logs")["lines"]]
    assert sorted(messages) == ["span forward: 10.000 ms", "span training_iteration: 105.000 ms"]


def test_spans_of_a_rank_with_an_agent_are_lines(client: TestClient, reader: Sender) -> None:
    rank = schema.RankRegistered(
        attempt=0, rank=0, time_ns=NOW, world_size=2, local_rank=0, local_world_size=1,
        node_rank=0, host="node-a", pid=1, sources={"collectives": "probe"},
    )  # fmt: skip
    reader.send(rank)
    answer = taken(client, of_rank(0, *step(1)))
    assert "6 spans of ranks that an agent records" in answer["partialSuccess"]["errorMessage"]
    assert cell(reader, 1)["step_ms"] is None
    assert reader.get("/logs")["total"] == 6


# --- logs and metrics --------------------------------------------------------------------------


def log(body: Any, severity: int = 9, **values: Any) -> dict[str, Any]:
    return {
        "timeUnixNano": str(NOW), "severityNumber": severity, "body": body,
        "attributes": attributes(values),
    }  # fmt: skip


def logs_of(*records: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"rankscope.run": "run", "rank": 1, "host.name": "node-a"} | more
    return {
        "resource": {"attributes": attributes(about)},
        "scopeLogs": [{"scope": {"name": "trainer"}, "logRecords": list(records)}],
    }


def test_logs_are_lines(client: TestClient, reader: Sender) -> None:
    reply = post(
        client, "logs",
        logs_of(
            log({"stringValue": "token=aB3dE6gH9jK2mN5pQ8sT1vW4yZ7"}, 17, step=3, api_key="abc"),
            log({"kvlistValue": {"values": attributes({"loss": 2.5})}}),
            log({"stringValue": "it broke"}, 21, **{"exception.stacktrace": "Traceback: here"}),
            # torchft: `rank` is that of each replica group
            log({"stringValue": "quorum"}, 0, rank=0, replica_id="r0", step=7),
        ),
    )  # fmt: skip
    assert (reply.status_code, reply.json()) == (200, {})
    lines = sorted(reader.get("/logs")["lines"], key=lambda one: one["message"])
    found = [(one["rank"], one["level"], one["step"], one["message"]) for one in lines]
    assert found[:3] == [
        (1, "CRITICAL", 0, "it broke\nTraceback: here"), (-1, "INFO", 7, "quorum"),
        (1, "ERROR", 3, "token=***"),
    ]  # fmt: skip
    assert json.loads(found[3][3]) == {"loss": 2.5}
    assert lines[2]["fields"]["api_key"] == "***"
    assert lines[1]["fields"]["replica_id"] == "r0"
    assert reader.get("/logs", q="quorum")["total"] == 1


def point(value: float, **values: Any) -> dict[str, Any]:
    return {"timeUnixNano": str(NOW), "asDouble": value, "attributes": attributes(values)}


def metrics_of(*metrics: dict[str, Any]) -> dict[str, Any]:
    about = {"rankscope.run": "run", "rank": 1, "host.name": "node-a"}
    return {
        "resource": {"attributes": attributes(about)},
        "scopeMetrics": [{"metrics": list(metrics)}],
    }


def test_metrics_are_numbers_of_steps(client: TestClient, reader: Sender) -> None:
    no_step = post(
        client, "metrics", metrics_of({"name": "x", "gauge": {"dataPoints": [point(1)]}})
    )
    assert no_step.json()["partialSuccess"]["rejectedDataPoints"] == "1"
    assert "give the attribute step" in no_step.json()["partialSuccess"]["errorMessage"]
    taken(client, of_rank(1, *step(1), *step(2)))
    memory = [point(5, kind="allocated"), point(7, kind="reserved")]
    reply = post(
        client, "metrics",
        metrics_of(
            {"name": "train.lr", "gauge": {"dataPoints": [point(0.5, step=1)]}},
            {"name": "gpu.memory", "gauge": {"dataPoints": memory}},  # of the newest step
            {"name": "wait", "histogram": {"dataPoints": [
                {"timeUnixNano": str(NOW), "count": "4", "sum": 10.0}]}},
        ),
    )  # fmt: skip
    note = "1 data points of distributions, of which count and mean are kept"
    assert reply.json() == {"partialSuccess": {"errorMessage": note}}
    series = {one["name"]: (one["step"], one["value"]) for one in reader.get("/metrics")["series"]}
    assert series == {
        "learning_rate": ([1], [0.5]), "gpu.memory{kind=allocated}": ([2], [5.0]),
        "gpu.memory{kind=reserved}": ([2], [7.0]), "wait.count": ([2], [4.0]),
        "wait.mean": ([2], [2.5]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("signal", "request_type", "answer_type"),
    [
        ("logs", ExportLogsServiceRequest, ExportLogsServiceResponse),
        ("metrics", ExportMetricsServiceRequest, ExportMetricsServiceResponse),
    ],
)
def test_an_empty_request_is_taken(
    client: TestClient, signal: str, request_type: Any, answer_type: Any
) -> None:
    body = request_type().SerializeToString()
    reply = client.post(f"/v1/{signal}", content=body, headers=PROTOBUF)
    assert reply.status_code == 200
    assert answer_type.FromString(reply.content) == answer_type()


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("train_step", "step", ""), ("iteration_12", "step", ""), ("ProfilerStep#7", "step", ""),
        ("training_single_iteration", "step", ""), ("Trainer.training_step", "step", ""),
        ("data_loading", "phase", "data"), ("dataloader.next", "phase", "data"),
        ("batch-generator", "phase", "data"), ("Net.forward", "phase", "forward"),
        ("forward-compute", "phase", "forward"), ("autograd.backward", "phase", "backward"),
        ("forward-backward", "phase", "other"), ("zero_grad", "phase", "optimizer"),
        ("AdamW.step", "update", "optimizer"), ("optimizer_update", "update", "optimizer"),
        ("checkpoint_save_sync", "phase", "checkpoint"), ("checkpoint_load", "", ""),
        ("validation_loop", "phase", "evaluation"), ("activation_checkpoint", "", ""),
        ("nccl:all_reduce", "call", "all_reduce"), ("ncclKernel_AllReduce", "call", "all_reduce"),
        ("c10d::reduce_scatter_", "call", "reduce_scatter"), ("barrier", "call", "barrier"),
        ("all-grads-sync", "call", "all_reduce"), ("dist.broadcast", "call", "broadcast"),
        ("forward-recv", "call", "recv"), ("send_metrics", "", ""), ("reduce_lr", "", ""),
        ("wait", "wait", ""), ("optimizer_initialization", "", ""), ("training_loop", "", ""),
        ("application", "run", "application"), ("GET /users", "", ""), ("", "", ""),
        ("span_start_event_for_model_forward", "mark", ""),
    ],
)  # fmt: skip
def test_names_of_spans(name: str, kind: str, what: str) -> None:
    found = named(name)
    assert (found.kind, found.what if kind != "run" else what) == (kind, what)


def test_the_newest_time_is_not_ours(client: TestClient, reader: Sender) -> None:
    """Times are those of the sender's clock, whenever it is sent."""
    taken(client, of_rank(0, *step(1)))
    assert reader.get("")["run"]["last_seen_ms"] < time.time() * 1e3
