"""What ingest takes, what it refuses, and what it answers to each."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema, zstd
from rankscope.wire.chunk import encode_chunk
from tests.server.conftest import Sender, TestClient, log_line
from tests.server.runs_sent import steps_of
from tests.server.seed import Plan, make_nodes, make_steps, step_chunk

NOW = 1_700_000_000 * 10**9
PLAIN = {"kind": "log", "attempt": 0, "rank": 0, "time_ns": 1, "level": 20, "message": ""}


def with_column(chunk: schema.Chunk, name: str, values: Any) -> schema.Chunk:
    columns: dict[str, Any] = {
        column: np.arange(chunk.count, dtype=np.int64) + 1 for column in schema.STEP_COLUMNS
    }
    columns[name] = values
    if values is None:
        del columns[name]
    return msgspec.structs.replace(chunk, data=encode_chunk(columns))


def test_good_batch_is_counted(sender: Sender) -> None:
    answer = sender.send(log_line("hello"), log_line("there"), chunks=[steps_of()])
    assert answer == {
        "accepted_records": 2, "accepted_chunks": 1, "duplicate": False, "refused": [],
        "commands": [], "watermark": None,
    }  # fmt: skip
    assert sender.get("")["counts"]["log_lines"] == 2
    assert sender.get("")["run"]["step"] == 5


def test_a_repeat_has_no_effect(client: TestClient, sender: Sender) -> None:
    body = sender.body(log_line("once"), chunks=[steps_of()])
    first = client.post("/api/v1/ingest", content=body).json()
    again = client.post("/api/v1/ingest", content=body).json()
    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert sender.get("/logs")["total"] == 1


def test_a_gap_is_accepted_named_and_filled_later(client: TestClient, sender: Sender) -> None:
    sender.send(log_line("one"))
    late = sender.body(log_line("two"))
    sender.send(log_line("three"))
    coverage = sender.get("")["coverage"]
    assert coverage["missing_batches"] == 1
    assert "1 batch missing" in coverage["text"]
    assert not client.post("/api/v1/ingest", content=late).json()["duplicate"]
    assert sender.get("")["coverage"]["missing_batches"] == 0
    assert sender.get("/logs")["total"] == 3


def test_zstd_body_is_read(client: TestClient, sender: Sender) -> None:
    body = zstd.pack(sender.body(log_line("packed")))
    reply = client.post("/api/v1/ingest", content=body, headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (log_line("x", rank=1 << 40), "rank"),
        (log_line("x", time_ns=-1), "time_ns"),
        (log_line("x", time_ns=(1 << 63) - 1), "time_ns"),
        (log_line("x", attempt=-1), "attempt"),
        (log_line("x", step=1 << 60), "step"),
        (log_line("x", level=-5), "level"),
        (PLAIN | {"time_ns": 1 << 63}, "time_ns"),
        ({key: value for key, value in PLAIN.items() if key != "message"}, "message"),
        (PLAIN | {"attempt": "0"}, "attempt"),
        ({"kind": "state", "attempt": 0, "rank": 0, "time_ns": 1, "step": 1, "phase": "nap",
          "phase_since_ns": 1, "heartbeat_ns": 1}, "phase"),
        (schema.RankState(attempt=0, rank=0, time_ns=1, step=1, phase="data", phase_since_ns=1,
                          heartbeat_ns=1, cpu_seconds=float("nan")), "cpu_seconds"),
        (schema.GroupDefined(attempt=0, rank=0, time_ns=1, group="g\0", ranks=[0], backend=""),
         "group"),
        (schema.GroupDefined(attempt=0, rank=0, time_ns=1, group="g", ranks=[-1], backend=""),
         "ranks"),
        (schema.RankRegistered(attempt=0, rank=-1, time_ns=1, world_size=1, local_rank=0,
                               local_world_size=1, node_rank=0, host="h", pid=1), "rank"),
        ({"kind": "telepathy", "attempt": 0, "rank": 0, "time_ns": 1}, "kind"),
        ({"no": "kind"}, "kind"),
        (17, "record"),
        (None, "record"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_and_its_neighbours_are_kept(
    sender: Sender, record: Any, field: str
) -> None:
    answer = sender.send(log_line("before"), record, log_line("after"))
    assert answer["accepted_records"] == 2
    (refused,) = answer["refused"]
    assert refused["index"] == 1
    assert field in refused["field"] or field in refused["reason"]
    assert refused["reason"]
    assert refused["remedy"]
    assert sender.get("/logs")["total"] == 2
    assert sender.get("")["coverage"]["refused"] == 1


def test_unknown_kind_says_which(sender: Sender) -> None:
    answer = sender.send({"kind": "telepathy", "attempt": 0, "rank": 0, "time_ns": 1})
    assert answer["refused"][0]["kind"] == "telepathy"
    assert "update the server" in answer["refused"][0]["remedy"]


def bad_chunks() -> dict[str, tuple[Any, str]]:
    good = steps_of()
    replaced = msgspec.structs.replace
    as_map = msgspec.to_builtins(good, builtin_types=(bytes,))
    ones = np.ones(good.count, np.int64)
    return {
        "not a chunk": (replaced(good, data=b"hello"), "data"),
        "truncated": (replaced(good, data=good.data[:-9]), "data"),
        "wrong count": (replaced(good, count=4), "count"),
        "missing column": (with_column(good, "data_ns", None), "data_ns"),
        "step zero": (with_column(good, "step", ones * 0), "step"),
        "negative time": (with_column(good, "started_ns", ones * -5_000), "started_ns"),
        "huge number": (with_column(good, "microbatches", ones << 62), "microbatches"),
        "huge step": (with_column(good, "step", ones << 50), "step"),
        "scattered steps": (with_column(good, "step", np.arange(1, 6) << 49), "step"),
        "negative rank": (replaced(good, rank=-1), "rank"),
        "wrong kind for the columns": (replaced(good, kind="host"), "time_ns"),
        "unknown kind": (as_map | {"kind": "smells"}, "kind"),
        "no data": ({key: value for key, value in as_map.items() if key != "data"}, "data"),
        "not a map": ([1, 2], "chunk"),
    }


@pytest.mark.parametrize("name", bad_chunks())
def test_a_bad_chunk_is_named_and_its_neighbours_are_kept(sender: Sender, name: str) -> None:
    chunk, field = bad_chunks()[name]
    answer = sender.send(log_line("kept"), chunks=[steps_of(rank=1), chunk])
    assert (answer["accepted_records"], answer["accepted_chunks"]) == (1, 1)
    (refused,) = answer["refused"]
    assert (refused["part"], refused["index"]) == ("chunks", 1)
    assert field in refused["field"] or field in refused["reason"]


def test_a_collective_of_which_only_the_arrival_is_known_is_kept(sender: Sender) -> None:
    columns: dict[str, Any] = {
        name: ["g"] if name in schema.STRING_COLUMNS else np.array([-1])
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns |= {"arrived_ns": np.array([NOW]), "step": np.array([1]), "state": np.array([1])}
    chunk = schema.Chunk(
        kind="collectives", attempt=0, rank=0, host="h", count=1, time_lo_ns=0, time_hi_ns=0,
        data=encode_chunk(columns),
    )  # fmt: skip
    answer = sender.send(chunks=[chunk])
    assert (answer["accepted_chunks"], answer["refused"]) == (1, [])


def test_words_where_numbers_belong(sender: Sender) -> None:
    count = 3
    columns: dict[str, Any] = {
        name: ["g"] * count if name in schema.STRING_COLUMNS else np.ones(count, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns["group"] = ["g\0"] * count
    chunk = schema.Chunk(
        kind="collectives", attempt=0, rank=0, host="h", count=count, time_lo_ns=0, time_hi_ns=0,
        data=encode_chunk(columns),
    )  # fmt: skip
    answer = sender.send(chunks=[chunk])
    assert answer["refused"][0]["field"] == "group"


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"run_id": ""}, 400, "run_id"),
        ({"run_id": "../etc"}, 400, "run_id"),
        ({"run_id": "x" * 200}, 400, "run_id"),
        ({"producer": "a\0b"}, 400, "producer"),
        ({"sequence": 0}, 400, "sequence"),
        ({"sequence": 1 << 63}, 400, "sequence"),
        ({"sequence": "1"}, 400, "sequence"),
        ({"sent_ns": -1}, 400, "sent_ns"),
        ({"records": {}}, 400, "records"),
        ({"schema_version": 2}, 422, "schema_version"),
        ({"schema_version": "1"}, 400, "schema_version"),
    ],
)
def test_a_bad_envelope_names_the_field(
    client: TestClient, sender: Sender, changes: dict[str, Any], status: int, field: str
) -> None:
    reply = client.post("/api/v1/ingest", content=sender.body(**changes))
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["field"] == field
    assert error["remedy"]
    assert error["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", b"\x80", b"\x93\x01\x02\x03", b"\xff" * 99])
def test_not_a_batch(client: TestClient, body: bytes) -> None:
    assert client.post("/api/v1/ingest", content=body).status_code == 400


def test_strings_that_are_not_utf8(client: TestClient, sender: Sender) -> None:
    body = sender.body(log_line("MARK"), log_line("kept"))
    answer = client.post("/api/v1/ingest", content=body.replace(b"MARK", b"\xff\xfe\xfd\xfc"))
    assert answer.status_code == 200
    assert answer.json()["accepted_records"] == 1
    body = sender.body(host="MARK")
    reply = client.post("/api/v1/ingest", content=body.replace(b"MARK", b"\xff\xfe\xfd\xfc"))
    assert reply.status_code == 400


def test_encodings_and_sizes(client: TestClient, sender: Sender) -> None:
    def post(body: bytes, encoding: str) -> int:
        headers = {"Content-Encoding": encoding}
        return client.post("/api/v1/ingest", content=body, headers=headers).status_code

    assert post(b"x", "gzip") == 415
    assert post(b"not zstd", "zstd") == 400
    assert post(zstd.pack(sender.body())[:-3], "zstd") == 400
    bomb = zstd.pack(b"\0" * (80 << 20))
    assert len(bomb) < 10_000
    assert post(bomb, "zstd") == 413
    assert client.post("/api/v1/ingest", content=b"\0" * (17 << 20)).status_code == 413


def test_long_text_is_cut_with_a_mark_and_nul_is_shown(sender: Sender) -> None:
    sender.send(log_line("a\0b" + "x" * 100_000))
    (line,) = sender.get("/logs")["lines"]
    assert len(line["message"]) == 65_536
    assert line["message"].startswith("a\N{SYMBOL FOR NULL}b")
    assert "[cut: " in line["message"][-60:]


def test_a_metric_that_is_not_a_number_is_kept_as_unknown(sender: Sender) -> None:
    values = {"loss": float("nan"), "norm": float("inf"), "rate": 0.5}
    sender.send(schema.Metrics(attempt=0, rank=0, time_ns=NOW, step=1, values=values))
    series = {item["name"]: item["value"] for item in sender.get("/metrics")["series"]}
    assert series == {"loss": [None], "norm": [None], "rate": [0.5]}
    loss = next(number for number in sender.get("")["numbers"] if number["key"] == "loss")
    assert (loss["value"], loss["reference_text"]) == (
        None,
        "step 1, the value of backward(), not a finite number",
    )


def test_losses_are_totals_per_producer(client: TestClient) -> None:
    def loss(count: int) -> schema.Loss:
        return schema.Loss(
            attempt=0, rank=3, time_ns=NOW, source="collectives", reason="overwritten", count=count
        )

    first, second = Sender(client, producer="a"), Sender(client, producer="b")
    first.send(loss(5))
    first.send(loss(7))
    second.send(loss(1))
    (row,) = first.get("")["coverage"]["losses"]
    assert (row["count"], row["rank"], row["reason"]) == (8, 3, "overwritten")


def test_totals_that_cannot_be_added_up_are_refused(client: TestClient) -> None:
    for number in range(3):
        sender = Sender(client, producer=f"p{number}")
        lost = schema.Loss(
            attempt=0, rank=number, time_ns=NOW, source="spool", reason="full", count=1 << 61
        )
        reply = client.post("/api/v1/ingest", content=sender.body(lost))
        (refused,) = reply.json()["refused"]
        assert (reply.status_code, refused["field"]) == (200, "count")
        reply = client.post("/api/v1/ingest", content=sender.body(sequence=(1 << 62) - 1))
        assert (reply.status_code, reply.json()["error"]["field"]) == (400, "sequence")
    assert sender.get("")["coverage"]["losses"] == []


def test_random_and_mutated_bytes_never_fail_the_server(client: TestClient, sender: Sender) -> None:
    rng = np.random.default_rng(7)
    plan = Plan(steps=20, ranks=2, ranks_per_node=2)
    (node,) = make_nodes(plan)
    good = sender.body(
        log_line("fuzz"),
        schema.ErrorRaised(attempt=0, rank=0, time_ns=NOW, type="ValueError", message="m"),
        schema.RankState(attempt=0, rank=0, time_ns=NOW, step=1, phase="data", phase_since_ns=NOW,
                         heartbeat_ns=NOW),
        chunks=[step_chunk(plan, make_steps(plan), rank, 0, 20) for rank in node.ranks],
    )  # fmt: skip
    deadline = time.monotonic() + 4
    statuses: set[int] = set()
    for round_number in range(1_500):
        if round_number % 5 == 0:
            body = rng.bytes(int(rng.integers(0, 400)))
        else:
            mutated = bytearray(good)
            for _ in range(int(rng.integers(1, 12))):
                mutated[int(rng.integers(len(mutated)))] = int(rng.integers(256))
            body = bytes(mutated[: int(rng.integers(1, len(mutated) * 4))])
        reply = client.post("/api/v1/ingest", content=body)
        statuses.add(reply.status_code)
        assert reply.status_code < 500, reply.text
        if time.monotonic() > deadline:
            break
    assert {200, 400} <= statuses
    for run in client.get("/api/v1/runs", params={"limit": 500}).json()["runs"]:
        for path in ("", "/ranks", "/logs", "/throughput", "/collectives", "/errors", "/findings"):
            assert client.get(f"/api/v1/runs/{run['run_id']}{path}").status_code == 200


def test_a_run_that_ended_shows_the_last_step_that_was_done(sender: Sender) -> None:
    state = schema.RankState(attempt=0, rank=0, time_ns=NOW, step=221, phase="other",
                             phase_since_ns=NOW, heartbeat_ns=NOW)  # fmt: skip
    sender.send(state, log_line("done", step=221))
    assert sender.get("")["run"]["step"] == 221  # it is in this step
    end = {"attempt": 0, "rank": 0, "time_ns": NOW, "reason": "clean", "exit_code": 0}
    sender.send(schema.RankEnded(last_step=220, **end))
    assert sender.get("")["run"]["step"] == 220
    assert [row["step"] for row in sender.get("/ranks")["ranks"]] == [220]
