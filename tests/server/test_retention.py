"""What is kept and what goes: plans, the work, deletion, and what comes too late."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.retention.kinds import NOT_OF_A_RUN, RAW_KINDS, RAW_PARTS, parts_of_run
from rankscope_server.retention.marks import PAUSE_NS, mark
from rankscope_server.settings import Settings
from rankscope_server.store import deletion, locks, tables
from rankscope_server.store.restart import newest_batch, replay
from tests.server.conftest import Sender, TestClient, log_line, new_data, poster, scraped
from tests.server.seed import seed_with

DAY_NS = 86_400 * 10**9
DAYS = {f"keep_{kind}_days": 1.0 for kind in RAW_KINDS}


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Any, database_url: str) -> Settings:
    """Settings with the rules of the test, and a thread that works only when a test says so."""
    rules: dict[str, Any] = getattr(request, "param", {})
    return Settings(
        data_dir=new_data(tmp_path / "data", database_url), database_url=database_url,
        look_seconds=3600.0, retention_seconds=80_000.0, disk_low_bytes=0, disk_reserve_bytes=0,
        **rules,
    )  # fmt: skip


def rules(**given: Any) -> Any:
    return pytest.mark.parametrize("settings", [given], indirect=True)


def service_of(client: TestClient) -> Any:
    return client.app.state.service  # type: ignore[attr-defined]


def age(client: TestClient, days: float) -> None:
    """Let everything that is stored have come so many days earlier."""
    service = service_of(client)
    deadline = time.monotonic() + 30
    while not service.retention.progress.round_ended_ns:  # the first round would find it old
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def shift(table: sa.Table, name: str, earlier: int) -> None:
        statement = sa.update(table).values({name: table.c[name] - earlier})
        service.writer.run(lambda unit: unit.connection.execute(statement))

    shift(tables.received_mark, "time_ns", 2 * PAUSE_NS)
    service.writer.run(mark)
    shift(tables.received_mark, "time_ns", int(days * DAY_NS))
    shift(tables.run, "received_ns", int(days * DAY_NS))


def counts(client: TestClient, run_id: str) -> dict[str, int]:
    """Return how many rows of a run each table holds."""
    found: dict[str, int] = {}
    with service_of(client).read() as connection:
        for _, part in parts_of_run():
            number = connection.scalar(
                sa.select(sa.func.count()).select_from(part.table).where(part.of_run(run_id))
            )
            found[part.table.name] = int(number or 0)
        for kind in ("collectives", "steps", "samples"):
            (part,) = RAW_PARTS[kind]  # type: ignore[index]
            number = connection.scalar(
                sa.select(sa.func.count()).select_from(part.table).where(part.of_run(run_id))
            )
            found[kind] = int(number or 0)
    return found


def a_run(client: TestClient, run_id: str, **choices: Any) -> None:
    plan = {"steps": 60, "gpus": True, "seed": 1, **choices}
    seed_with(poster(client), run_id=run_id, **plan)
    service_of(client).analysis.look_now()


def test_every_table_is_of_a_run_or_named() -> None:
    """A new table appears here: decide whether it goes with its run."""
    of_run = {part.table.name for _, part in parts_of_run()} | {"run"}
    others = {table.name for table in NOT_OF_A_RUN}
    assert of_run | others == set(tables.metadata.tables)
    assert of_run & others == set()
    assert of_run == {
        "advice", "advice_report", "alert", "alert_delivery", "analysis_part", "analysis_state",
        "attempt", "batch", "chunk", "clock_offset", "command", "command_rank", "environment",
        "error_event", "event", "finding", "finding_event", "journal", "lease", "log_block",
        "log_kind", "log_word", "loss", "metric",
        "op_rollup", "pin", "process_group", "producer", "rank", "removal", "run", "sample_span",
        "segment",
        "stacks", "step_tile", "stored_size", "trace_part",
    }  # fmt: skip


def test_by_default_nothing_goes(client: TestClient) -> None:
    a_run(client, "old")
    before = counts(client, "old")
    age(client, 3000)
    service_of(client).retention.round()
    assert counts(client, "old") | {"stored_size": 0} == before | {"stored_size": 0}
    answer = client.get("/api/v1/retention").json()
    assert (answer["are_any"], answer["planned"]) == (False, [])


def test_sizes_are_those_of_the_rows(client: TestClient) -> None:
    a_run(client, "one")
    a_run(client, "two", steps=20, seed=2)
    for _ in range(2):  # counted anew, then from what was written down
        body = client.get("/api/v1/storage").json()
        by_run = {run["run_id"]: run for run in body["runs"]}
        with service_of(client).read() as connection:
            for name in ("one", "two"):
                chunk = tables.chunk.c
                stored = connection.scalar(
                    sa.select(sa.func.sum(sa.func.length(chunk.data))).where(
                        chunk.run_id == name, chunk.kind == "collectives"
                    )
                )
                row = by_run[name]["kinds"]
                assert stored < row["collectives"] < stored * 1.2
                assert min(row.values()) > 0
        assert sum(run["bytes"] for run in body["runs"]) == body["bytes"]
        assert sum(kind["bytes"] for kind in body["kinds"]) == body["bytes"]
        age(client, 0.01)
        service_of(client).retention.round()
    assert body["disk"]["database_bytes"] > 0


@rules(**DAYS)
def test_raw_data_goes_by_age_and_what_is_derived_stays(client: TestClient) -> None:
    a_run(client, "old")
    a_run(client, "pinned", seed=2)
    assert client.put("/api/v1/runs/pinned/pin").json() == {"run_id": "pinned", "is_pinned": True}
    age(client, 2)
    a_run(client, "new", seed=3)
    before = {name: counts(client, name) for name in ("old", "pinned", "new")}
    sender = Sender(client, "old")
    shown = {path: sender.get(path) for path in ("/findings", "/map", "/collectives")}
    planned = client.get("/api/v1/retention").json()["planned"]
    assert {row["run_id"] for row in planned} == {"old"}
    assert {row["kind"] for row in planned} == {*RAW_KINDS}
    assert before == {name: counts(client, name) for name in before}  # a dry run
    service_of(client).retention.round()
    after = counts(client, "old")
    raw = {
        "collectives", "steps", "samples", "chunk", "event", "stacks", "trace_part", "log_block",
        "metric", "journal",
    }  # fmt: skip
    assert {name for name in raw if after[name]} == set()
    for name in ("step_tile", "op_rollup", "finding", "batch", "rank"):
        assert after[name] == before["old"][name] > 0, name
    for name in ("pinned", "new"):
        changed = {"stored_size"}
        assert {k: v for k, v in counts(client, name).items() if k not in changed} == {
            k: v for k, v in before[name].items() if k not in changed
        }
    shown["/map"]["marks"] = [mark for mark in shown["/map"]["marks"] if mark["kind"] == "onset"]
    left = {path: sender.get(path) for path in shown}
    left["/map"]["marks"] = [mark for mark in left["/map"]["marks"] if mark["kind"] == "onset"]
    assert left == shown  # but for checkpoints, which are events
    gone = {row["kind"]: row for row in sender.get("")["removed"]}
    asked = {row["kind"]: row for row in planned}
    for kind, row in asked.items():
        assert (gone[kind]["rows"], gone[kind]["bytes"]) == (row["rows"], row["bytes"])
        assert "removed by retention" in gone[kind]["text"]
    metrics = client.get("/metrics").text
    assert 'rankscope_retention_removed_rows_total{kind="collectives"}' in metrics
    assert client.get("/api/v1/retention").json()["planned"] == []


@rules(keep_collectives_days=1.0)
def test_of_a_live_run_what_a_restart_reads_stays(client: TestClient) -> None:
    a_run(client, "live", end=False)
    age(client, 2)  # the data is old, and the run is still there:
    Sender(client, "live", "other").send(log_line("still here"))
    a_run(client, "live2", end=False)
    service_of(client).retention.round()
    assert counts(client, "live")["collectives"] == 0
    assert counts(client, "live2")["collectives"] > 0
    assert client.delete("/api/v1/runs/live?confirm=live").status_code == 409


@rules(keep_collectives_days=0.0001, replay_hours=6.0)
def test_a_live_run_keeps_the_hours_of_replay(client: TestClient) -> None:
    a_run(client, "live", end=False)
    a_run(client, "over")
    age(client, 0.01)
    Sender(client, "live", "other").send(log_line("still here"))
    service_of(client).retention.round()
    assert counts(client, "live")["collectives"] > 0
    assert counts(client, "over")["collectives"] == 0


@rules(keep_collectives_bytes=20_000)
def test_the_oldest_go_by_size(client: TestClient) -> None:
    names = ["first", "second", "third"]
    for number, name in enumerate(names):
        a_run(client, name, seed=number, steps=90)
    age(client, 1)
    sizes = {
        run["run_id"]: run["kinds"]["collectives"]
        for run in client.get("/api/v1/storage").json()["runs"]
    }
    assert sum(sizes.values()) > 20_000
    planned = client.get("/api/v1/retention").json()["planned"]
    service_of(client).retention.round()
    left = {
        run["run_id"]: run["kinds"].get("collectives", 0)
        for run in client.get("/api/v1/storage").json()["runs"]
    }
    assert 0 < sum(left.values()) <= 20_000
    assert sum(sizes.values()) - sum(left.values()) == sum(row["bytes"] for row in planned)
    assert left["first"] < sizes["first"]  # a part of it is enough
    assert (left["second"], left["third"]) == (sizes["second"], sizes["third"])


@rules(keep_numbers_bytes=20_000)
def test_the_oldest_numbers_go_by_size(client: TestClient) -> None:
    for number, name in enumerate(("first", "second")):
        a_run(client, name, seed=number, steps=90, steps_per_batch=5)
    age(client, 1)

    def sizes() -> dict[str, int]:
        runs = client.get("/api/v1/storage").json()["runs"]
        return {run["run_id"]: run["kinds"].get("numbers", 0) for run in runs}

    before = sizes()
    assert min(before.values()) > 20_000
    planned = client.get("/api/v1/retention").json()["planned"]
    assert {row["kind"] for row in planned} == {"numbers"}
    service_of(client).retention.round()
    left = sizes()
    assert 0 < sum(left.values()) <= 20_000
    assert sum(before.values()) - sum(left.values()) == sum(row["bytes"] for row in planned)
    assert left["first"] == 0  # the oldest


def records_of(client: TestClient, run_id: str) -> list[Any]:
    """Return what a restarted server would read of a run."""
    read: list[Any] = []

    class Taking:
        def apply_record(self, record: Any) -> None:
            read.append(record)

        def apply_chunk(self, chunk: Any, columns: Any) -> None:
            """Nothing: records alone."""

    with service_of(client).read() as connection:
        replay(connection, run_id, Taking(), newest_batch(connection, run_id), 1 << 62)
    return read


@rules(keep_events_days=1.0, keep_numbers_days=1.0)
def test_copies_for_a_restart_go_too_and_what_lasts_stays(client: TestClient) -> None:
    sender = Sender(client, "old")
    base = {"attempt": 0, "rank": 0, "time_ns": 1_700_000_000 * 10**9}
    lasting = [schema.Event(name=name, **base) for name in sorted(schema.LASTING_EVENTS)]
    group = schema.GroupDefined(group="dp", ranks=[0], backend="gloo", **base)
    ageing = [
        schema.Event(name="checkpoint", step=3, fields={"seconds": "2"}, **base),
        schema.Stacks(reason="asked", text="main: step", **base),
        schema.Metrics(step=3, values={"loss": 1.5}, **base),
    ]
    sender.send(*lasting, group, *ageing)
    sent = [*lasting, group, *ageing]
    assert sorted(map(repr, records_of(client, "old"))) == sorted(map(repr, sent))
    age(client, 2)
    sender.send(schema.Metrics(step=4, values={"loss": 1.25}, **base))
    planned = client.get("/api/v1/retention").json()["planned"]
    # beside what lasts: the checkpoint, the stacks, and the copy of both for a restart
    goes = {"events": len(lasting) + 3, "numbers": 2}
    assert {row["kind"]: row["rows"] for row in planned} == goes
    service_of(client).retention.round()
    left = records_of(client, "old")
    new = schema.Metrics(step=4, values={"loss": 1.25}, **base)
    assert sorted(map(repr, left)) == sorted(map(repr, [*lasting, group, new]))
    assert [row["step"] for row in sender.get("/metrics")["series"]] == [[4]]
    gone = {row["kind"]: row["rows"] for row in sender.get("")["removed"]}
    assert gone == goes


@rules(keep_events_days=0.0001, keep_numbers_days=0.0001, replay_hours=6.0)
def test_a_restarted_server_goes_on_with_a_live_run(client: TestClient) -> None:
    a_run(client, "live", end=False)
    before = counts(client, "live")
    found = Sender(client, "live").get("/findings")
    age(client, 0.01)
    Sender(client, "live", "other").send(log_line("still here"))
    service_of(client).retention.round()
    after = counts(client, "live")
    for name in ("journal", "metric", "event"):
        assert after[name] == before[name] > 0, name
    state, now_ns = RunState("live"), time.time_ns()
    with service_of(client).read() as connection:
        newest = newest_batch(connection, "live")
        replay(connection, "live", state, newest, now_ns - 6 * 3600 * 10**9)
    again = {finding.what for finding in state.look(now_ns).findings}
    assert {one["what"] for one in found["open"]} <= again


@rules(keep_runs_days=30.0)
def test_whole_runs_go_by_age_but_not_pinned_ones(client: TestClient) -> None:
    a_run(client, "old")
    a_run(client, "pinned")
    client.put("/api/v1/runs/pinned/pin")
    age(client, 31)
    a_run(client, "new")
    assert [
        (row["run_id"], row["kind"]) for row in client.get("/api/v1/retention").json()["planned"]
    ] == [("old", "run")]
    service_of(client).retention.round()
    runs = {run["run_id"] for run in client.get("/api/v1/runs").json()["runs"]}
    assert runs == {"pinned", "new"}
    assert sum(counts(client, "old").values()) == 0
    (row,) = client.get("/api/v1/retention").json()["deletions"]
    assert (row["run_id"], row["reason"]) == ("old", "age")
    assert row["rows"] == pytest.approx(row["rows_at_start"], rel=0.2)


@rules(keep_runs_bytes=1)
def test_a_limit_that_cannot_be_kept_is_told(client: TestClient) -> None:
    a_run(client, "pinned")
    client.put("/api/v1/runs/pinned/pin")
    a_run(client, "live", end=False)
    age(client, 0.01)
    service_of(client).retention.round()
    assert {run["run_id"] for run in client.get("/api/v1/runs").json()["runs"]} == {
        "pinned", "live",
    }  # fmt: skip
    (told,) = client.get("/api/v1/retention").json()["unmet"]
    assert "--keep-runs-bytes" in told


def wait_until_deleted(client: TestClient, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        row: dict[str, Any] = client.get(f"/api/v1/deletions/{run_id}").json()
        if row["finished_ms"] is not None:
            return row
        assert time.monotonic() < deadline, row
        time.sleep(0.02)


def test_a_deleted_run_leaves_nothing_and_does_not_come_back(client: TestClient) -> None:
    a_run(client, "gone", fault="hang", hang_seconds=30.0)
    a_run(client, "stays", seed=2)
    line = "unmistakable"
    Sender(client, "gone", "late").send(*(log_line(f"{line} {n}") for n in range(600)))
    assert client.get(f"/api/v1/search?q={line}").json()["total"] == 600
    before = counts(client, "stays")
    stop(client, "gone")
    assert client.delete("/api/v1/runs/gone").status_code == 422
    assert client.delete("/api/v1/runs/gone?confirm=stays").status_code == 422
    assert client.delete("/api/v1/runs/gone?confirm=gone").status_code == 200
    reply = client.get("/api/v1/runs/gone")
    assert reply.status_code == 410
    assert "deleted" in reply.json()["error"]["what"]
    assert client.get(f"/api/v1/search?q={line}").json()["total"] == 0  # at once
    wait_until_deleted(client, "gone")
    assert sum(counts(client, "gone").values()) == 0
    assert counts(client, "stays") | {"stored_size": 0} == before | {"stored_size": 0}
    assert client.get(f"/api/v1/search?q={line}").json()["total"] == 0
    if service_of(client).reader.dialect.name == "sqlite":  # nor does the index know its words
        with service_of(client).read() as connection:
            known = "SELECT count(*) FROM log_index WHERE log_index MATCH ?"
            assert connection.exec_driver_sql(known, (f'"{line[:3]}"',)).scalar() == 0
    # What comes late is refused with what to do, and leaves no trace.
    late = Sender(client, "gone", "late")
    late.sequence = 7
    reply = client.post("/api/v1/ingest", content=late.body(log_line("late")))
    assert reply.status_code == 410
    assert "another id" in reply.json()["error"]["remedy"]
    service_of(client).analysis.look_now()
    assert sum(counts(client, "gone").values()) == 0
    assert client.delete("/api/v1/runs/gone?confirm=gone").status_code == 410
    # Until a person frees the id.
    assert client.delete("/api/v1/deletions/gone").json()["is_released"] is True
    assert client.get("/api/v1/runs/gone").status_code == 404
    assert client.post("/api/v1/ingest", content=late.body(log_line("anew"))).status_code == 200
    assert client.get("/api/v1/runs/gone").status_code == 200


def stop(client: TestClient, run_id: str) -> None:
    """Let a run be heard of long ago."""

    def work(unit: Any) -> None:
        run = tables.run
        unit.connection.execute(sa.update(run).where(run.c.run_id == run_id).values(received_ns=1))

    service_of(client).writer.run(work)


def test_a_look_that_was_under_way_writes_nothing(client: TestClient) -> None:
    a_run(client, "gone", fault="slow_compute")
    service = service_of(client)
    run = service.analysis._runs["gone"]
    run.outcome = type(run.outcome)()  # as if its findings were new
    client.delete("/api/v1/runs/gone?confirm=gone")
    wait_until_deleted(client, "gone")
    service.analysis._look("gone", run)
    assert sum(counts(client, "gone").values()) == 0
    assert "gone" not in service.analysis._runs


@pytest.mark.parametrize("status", ["live", "pinned", "unknown"])
def test_what_may_not_be_deleted_says_why(client: TestClient, status: str) -> None:
    if status != "unknown":
        a_run(client, status, end=status != "live")
    if status == "pinned":
        client.put("/api/v1/runs/pinned/pin")
    reply = client.delete(f"/api/v1/runs/{status}?confirm={status}")
    assert reply.status_code == (404 if status == "unknown" else 409)
    assert reply.json()["error"]["remedy"]
    if status == "pinned":
        client.delete("/api/v1/runs/pinned/pin")
        assert client.delete("/api/v1/runs/pinned?confirm=pinned").status_code == 200


@rules(keep_collectives_days=1.0)
def test_ids_that_are_given_again_are_young(client: TestClient) -> None:
    """SQLite gives the ids of removed last rows again: what comes then is new all the same."""
    a_run(client, "old")
    age(client, 2)
    client.delete("/api/v1/runs/old?confirm=old")
    wait_until_deleted(client, "old")
    a_run(client, "new")
    before = counts(client, "new")["collectives"]
    assert before > 0
    service_of(client).retention.round()
    assert counts(client, "new")["collectives"] == before
    size = {run["run_id"]: run["kinds"] for run in client.get("/api/v1/storage").json()["runs"]}
    assert size["new"]["collectives"] > 0


@rules(keep_collectives_days=1.0)
def test_the_clock_of_a_sender_says_nothing_of_age(client: TestClient) -> None:
    a_run(client, "imported", start_ns=1_500_000_000 * 10**9)
    a_run(client, "ahead", start_ns=time.time_ns() + 400 * DAY_NS)
    service_of(client).retention.round()
    assert counts(client, "imported")["collectives"] > 0
    age(client, 2)
    service_of(client).retention.round()
    assert counts(client, "imported")["collectives"] == counts(client, "ahead")["collectives"] == 0


def test_metrics_of_deletion(client: TestClient) -> None:
    a_run(client, "gone")
    client.delete("/api/v1/runs/gone?confirm=gone")
    wait_until_deleted(client, "gone")
    assert scraped(client)["rankscope_retention_removed_bytes_total"] > 0


def test_an_event_of_a_node_without_ranks_is_removed_with_its_run(client: TestClient) -> None:
    sender = Sender(client, "bare")
    sender.send(schema.Event(attempt=0, rank=-1, time_ns=1, name="x"))
    stop(client, "bare")
    client.delete("/api/v1/runs/bare?confirm=bare")
    wait_until_deleted(client, "bare")
    assert sum(counts(client, "bare").values()) == 0


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_batch_that_is_being_stored_ends_before_its_run_is_deleted(client: TestClient) -> None:
    """Of another server on the same database: what it acknowledges is removed, not left over."""
    a_run(client, "gone")
    service = service_of(client)
    other = sa.create_engine(service.reader.url)
    with other.begin() as connection:
        locks.take_locks(connection, {locks.of_run("gone")})
        assert deletion.find_deletion(connection, "gone") is None
        asked = threading.Thread(target=client.delete, args=("/api/v1/runs/gone?confirm=gone",))
        asked.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        deadline = time.monotonic() + 20
        while not scalar(service, waiting):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        event = {"run_id": "gone", "name": "late", "time_ns": 1}
        connection.execute(sa.insert(tables.event).values(event))
    asked.join(20)
    wait_until_deleted(client, "gone")
    assert sum(counts(client, "gone").values()) == 0
    with other.begin() as connection:
        assert deletion.find_deletion(connection, "gone") is not None
    other.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_postgresql_uses_the_room_of_a_deleted_run_again(client: TestClient) -> None:
    service = service_of(client)
    sizes = []
    for number in range(4):
        a_run(client, f"run-{number}", seed=number, steps=120)
        sizes.append(scalar(service, "SELECT pg_total_relation_size('chunk')"))
        client.delete(f"/api/v1/runs/run-{number}?confirm=run-{number}")
        wait_until_deleted(client, f"run-{number}")
        deadline = time.monotonic() + 20
        while service.retention.progress.state != "idle":  # it vacuums
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert sizes[-1] <= sizes[0] * 1.3, sizes


def scalar(service: Any, query: str) -> int:
    with service.read() as connection:
        return int(connection.exec_driver_sql(query).scalar_one())
