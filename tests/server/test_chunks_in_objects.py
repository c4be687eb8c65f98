"""A server whose chunks are in objects answers as one whose chunks are in the database."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import httpx
import msgspec
import obstore
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from rankscope.data.batches import batches_of
from rankscope.data.kinds import schema_of
from rankscope.wire.chunk import decode_chunk
from rankscope.wire.stored import ChunkPage
from rankscope_server.api.app import create_app
from rankscope_server.retention.compaction import MeanwhileError, put_in_place, segments_of
from rankscope_server.retention.kinds import content_bytes
from rankscope_server.retention.marks import PAUSE_NS, mark
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.objects import TIMEOUT_SECONDS
from tests.server.conftest import (
    Sender,
    ServerProcess,
    TestClient,
    log_line,
    new_data,
    poster,
    wait_until,
)
from tests.server.filling import Stream, chunk
from tests.server.object_stores import BUCKET, SeaweedFS
from tests.server.seed import seed_with

RUN = "run"
PAGES = (  # those that read chunks, and some that read tiles
    "", "/findings", "/map", "/collectives", "/collectives?from=20&to=40", "/collectives/records",
    "/collectives/records?rank=2&from=10&to=30", "/steps/45", "/communication", "/machines",
    "/samples?kind=gpu", "/resources",
)  # fmt: skip
OF_CHUNKS = (
    "/collectives?from=20&to=40", "/collectives/records", "/communication", "/samples?kind=gpu",
)  # fmt: skip
DAY_NS = 86_400 * 10**9


@contextmanager
def serving(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield client


def service_of(client: TestClient) -> Any:
    return client.app.state.service  # type: ignore[attr-defined]


def sent(client: TestClient, run_id: str, seed: int = 1) -> list[bytes]:
    """Send a run; return its batches."""
    bodies: list[bytes] = []
    send = poster(client)

    def post(body: bytes) -> None:
        bodies.append(body)
        send(body)

    seed_with(post, run_id=run_id, steps=60, gpus=True, seed=seed)
    service_of(client).analysis.look_now()
    return bodies


def pages_of(client: TestClient) -> dict[str, Any]:
    found = {}
    for page in PAGES:
        reply = client.get(f"/api/v1/runs/{RUN}{page}")
        assert reply.status_code == 200, reply.text
        found[page] = reply.json()
    return found


def events_of(client: TestClient, kind: str) -> tuple[list[Any], int]:
    """Return all chunks of a kind as programs read them, and how many could not be read."""
    chunks, unread, after = list[Any](), 0, None
    while True:
        params = {"kind": kind} | ({} if after is None else {"after": after})
        reply = client.get(f"/api/v1/runs/{RUN}/chunks", params=params)
        page = msgspec.msgpack.decode(reply.content, type=ChunkPage)
        chunks += page.chunks
        unread += page.num_unread
        after = page.after
        if after is None:
            return chunks, unread


@pytest.fixture(params=["folder", "S3"])
def in_objects(
    request: pytest.FixtureRequest,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Settings:
    """Settings with objects, of each database."""
    if request.param == "folder":
        return replace(settings, blobs=f"file://{tmp_path}/objects")
    seaweed: SeaweedFS = request.getfixturevalue("seaweed")
    for name, text in seaweed.environ.items():
        monkeypatch.setenv(name, text)
    return replace(settings, blobs=f"s3://{BUCKET}/test-{time.time_ns()}")


def test_every_page_is_the_same(in_objects: Settings, tmp_path: Path) -> None:
    """Also after a restart, whose analysis reads the chunks again."""
    column = Settings(
        data_dir=new_data(tmp_path / "column"), look_seconds=3600.0, disk_reserve_bytes=0
    )
    with serving(column) as client:
        bodies = sent(client, RUN)
        expected = pages_of(client)
        events = {kind: events_of(client, kind) for kind in ("collectives", "steps", "gpu")}
    with serving(in_objects) as client:
        for body in bodies:
            poster(client)(body)
        service_of(client).analysis.look_now()
        with service_of(client).read() as connection:
            table = tables.chunk.c
            held = sa.select(sa.func.max(sa.func.length(table.data)), sa.func.count(table.object))
            largest, in_objects_count = connection.execute(held).one()
        assert (largest, in_objects_count) == (0, sum(len(one) for one in all_chunks(client)))
        assert without_times(pages_of(client)) == without_times(expected)
        assert {kind: events_of(client, kind) for kind in events} == events
        parts = {
            part["part"]: part["reason"] for part in client.get("/api/v1/ready").json()["parts"]
        }
        assert parts["blobs"] == ""
    with serving(in_objects) as client:
        service_of(client).analysis.look_now()
        assert without_times(pages_of(client)) == without_times(expected)


def all_chunks(client: TestClient) -> list[list[Any]]:
    with service_of(client).read() as connection:
        kinds = connection.scalars(sa.select(tables.chunk.c.kind).distinct()).all()
    return [events_of(client, kind)[0] for kind in kinds]


def without_times(pages: dict[str, Any]) -> dict[str, Any]:
    """Leave out when something was received or looked at, which differs by server."""
    return {page: _without(found) for page, found in pages.items()}


_TIMES = {"received_ms", "looked_ms", "opened_ms", "updated_ms", "recovered_ms", "advice_epoch",
          "behind_seconds", "time_ms", "age_seconds"}  # fmt: skip


def _without(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without(one) for name, one in found.items() if name not in _TIMES}
    return [_without(one) for one in found] if isinstance(found, list) else found


def objects_of(client: TestClient) -> set[str]:
    """Return the objects that are there, of any age."""
    blobs = service_of(client).blobs
    return {name for names in blobs.objects_before(time.time_ns() + DAY_NS) for name in names}


def test_what_is_lost_is_said_and_what_is_damaged_too(in_objects: Settings) -> None:
    """Answers have what is left, say what they lack, and tiles answer as before."""
    with serving(in_objects) as client:
        sent(client, RUN)
        before = pages_of(client)
        chunks, unread = events_of(client, "steps")
        assert unread == 0
        blobs = service_of(client).blobs
        names = sorted(objects_of(client))
        lost = [name for name in names if "/steps/" not in name]
        blobs.delete(lost[::2])
        for name in lost[1::2]:
            obstore.put(blobs._store, name, b"other bytes")
        after = pages_of(client)
        for page in OF_CHUNKS:
            said = [one for one in after[page]["left_out"] if "missing" in one["what"]]
            assert said, page
            assert said[0]["count"] > 0, page
        assert events_of(client, "steps") == (chunks, 0)
        found, unread = events_of(client, "collectives")
        assert found == []
        assert unread > 0
        same = {page: before[page] for page in ("", "/map", "/findings", "/collectives")}
        assert {page: after[page] for page in same} == same
    with serving(in_objects) as client:  # the analysis reads what is left
        service_of(client).analysis.look_now()
        assert pages_of(client)["/map"] == before["/map"]


def test_objects_go_with_their_rows(in_objects: Settings) -> None:
    """Those of a deleted run, and of a kind that is too old; what no row names after a day."""
    rules = {"keep_samples_days": 1.0, "retention_seconds": 80_000.0, "forget_after_seconds": 0.1}
    with serving(replace(in_objects, **rules)) as client:
        for number, name in enumerate((RUN, "other")):
            sent(client, name, seed=number)
        folders = {name.split("/")[2].rpartition("-")[0] for name in objects_of(client)}
        assert folders == {RUN, "other"}
        storage = client.get("/api/v1/storage").json()
        sizes = {run["run_id"]: run["kinds"] for run in storage["runs"]}
        with service_of(client).read() as connection:
            chunk = tables.chunk.c
            of_steps = sa.select(sa.func.sum(chunk.num_bytes)).where(
                chunk.run_id == RUN, chunk.kind == "steps"
            )
            stored = int(connection.scalar(of_steps))
        assert stored < sizes[RUN]["steps"] < stored * 1.5
        age(client, 2)
        service_of(client).retention.round()
        assert kinds_of(client) == {(RUN, "collectives"), (RUN, "steps"), ("other", "collectives"),
                                    ("other", "steps")}  # fmt: skip
        assert client.delete("/api/v1/runs/other?confirm=other").status_code == 200
        service_of(client).retention.round()
        wait_until(lambda: kinds_of(client) == {(RUN, "collectives"), (RUN, "steps")})
        (orphan,) = service_of(client).blobs.put([("run/steps", b"of a transaction that failed")])
        service_of(client).retention.round()
        assert orphan.object in objects_of(client)  # its transaction may still be under way
        loop = service_of(client).retention
        loop._clock, loop._sweep_due = lambda: time.time_ns() + 2 * DAY_NS, 0.0
        loop.round()
        assert orphan.object not in objects_of(client)
        assert kinds_of(client) == {(RUN, "collectives"), (RUN, "steps")}
        assert events_of(client, "steps")[1] == 0


def kinds_of(client: TestClient) -> set[tuple[str, str]]:
    """Return the runs and kinds of which there are objects."""
    parts = [name.split("/") for name in objects_of(client)]
    return {(part[2].rpartition("-")[0], part[3]) for part in parts}


def age(client: TestClient, days: float) -> None:
    """Let everything that is stored have come so many days earlier."""
    service = service_of(client)
    wait_until(lambda: service.retention.progress.round_ended_ns)

    def shift(table: sa.Table, name: str, earlier: int) -> None:
        statement = sa.update(table).values({name: table.c[name] - earlier})
        service.writer.run(lambda unit: unit.connection.execute(statement))

    shift(tables.received_mark, "time_ns", 2 * PAUSE_NS)
    service.writer.run(mark)
    shift(tables.received_mark, "time_ns", int(days * DAY_NS))
    shift(tables.run, "received_ns", int(days * DAY_NS))


def test_a_database_that_names_objects_says_that_their_store_is_not_set(
    settings: Settings, tmp_path: Path
) -> None:
    with serving(replace(settings, blobs=f"file://{tmp_path}/objects")) as client:
        sent(client, RUN)
    with serving(settings) as client:
        ready = client.get("/api/v1/ready")
        assert ready.status_code == 503
        assert "set --blobs as it was" in ready.json()["error"]["what"]
        reply = client.get(f"/api/v1/runs/{RUN}/collectives/records")
        assert (reply.status_code, reply.json()["error"]["remedy"]) == (503, "set --blobs")
        assert client.get(f"/api/v1/runs/{RUN}/map").status_code == 200


@pytest.mark.parametrize("how", ["hangs", "is killed"])
def test_a_store_that_does_not_answer_refuses_batches_and_tiles_are_shown(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing that was acknowledged is lost, and what was refused is taken afterwards."""
    store = SeaweedFS(tmp_path / "seaweed").start()
    try:
        for name, text in store.environ.items():
            monkeypatch.setenv(name, text)
        with serving(replace(settings, blobs=f"s3://{BUCKET}")) as client:
            sent(client, RUN)
            before = events_of(client, "steps")
            body = Sender(client, RUN, "late").body(chunks=[chunk(7)])
            store.send(signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
            for _ in range(3):  # the later ones at once
                began = time.monotonic()
                reply = client.post("/api/v1/ingest", content=body)
                took = time.monotonic() - began
                assert reply.status_code == 503, reply.text
                assert int(reply.headers["retry-after"]) > 0
                assert "store of objects does not answer" in reply.json()["error"]["what"]
                assert took < 2 * TIMEOUT_SECONDS
            assert took < 1.0
            ready = client.get("/api/v1/ready")
            assert ready.status_code == 503
            assert "blobs: the store of objects does not answer" in ready.json()["error"]["what"]
            for page, status in (("/map", 200), ("/collectives", 200), ("", 200), ("/chunks", 503)):
                reply = client.get(f"/api/v1/runs/{RUN}{page}", params={"kind": "steps"})
                assert reply.status_code == status, (page, reply.text)
            accepted = Sender(client, RUN, "lines").send(log_line("no chunk is in this"))
            assert accepted["accepted_records"] == 1
            assert 'rankscope_unavailable_total{cause="blobs"} 4.0' in client.get("/metrics").text
            if how == "hangs":
                store.send(signal.SIGCONT)
            else:
                store.start()
            wait_until(lambda: client.get("/api/v1/ready").status_code == 200)
            again = client.post("/api/v1/ingest", content=body)
            assert (again.status_code, again.json()["duplicate"]) == (200, False)
            found, unread = events_of(client, "steps")
            assert (found[: len(before[0])], unread) == (before[0], 0)
            assert len(found) == len(before[0]) + 1
    finally:
        store.close()


@pytest.mark.needs("mount")
def test_a_full_disk_of_objects_is_said(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        with serving(replace(settings, blobs=f"file://{folder}/objects")) as client:
            sender, number = Sender(client, RUN), 0
            reply = client.post("/api/v1/ingest", content=sender.body(chunks=[chunk(0)]))
            while reply.status_code == 200:
                number += 1
                assert number < 100
                reply = client.post("/api/v1/ingest", content=sender.body(chunks=[chunk(number)]))
            assert number > 5
            assert reply.status_code == 503
            assert reply.json()["error"]["what"] == "the store of objects is full"
            found, unread = events_of(client, "steps")
            assert (len(found), unread) == (number, 0)
            service_of(client).retention.round()
            assert client.get(f"/api/v1/runs/{RUN}/map").status_code == 200
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class UntilKilled(Stream):
    """A stream whose server is killed."""

    def run(self) -> None:
        with suppress(httpx.TransportError):
            super().run()


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Killed in the middle of batches, again and again; objects without a row may be left."""
    flags = ("--blobs", f"file://{tmp_path}/objects")
    acknowledged = 0
    for round_ in range(4):
        server = start_server(*flags)
        stream = UntilKilled(server.url, f"run-{round_}")
        stream.start()
        wait_until(lambda stream=stream: len(stream.acknowledged) > 10)
        server.end(signal.SIGKILL)
        stream.over.set()
        stream.join(60)
        acknowledged += len(stream.acknowledged)
    server = start_server(*flags)
    num_stored = 0
    for round_ in range(4):
        reply = httpx.get(f"{server.url}/api/v1/runs/run-{round_}/chunks", params={"kind": "steps"})
        page = msgspec.msgpack.decode(reply.content, type=ChunkPage)
        assert (page.num_unread, page.after) == (0, None)
        assert [decode_chunk(one.data)["step"][0] for one in page.chunks] == [
            20 * (at + 1) + 1 for at in range(len(page.chunks))
        ]
        num_stored += len(page.chunks)
    # one more of each round may have been stored and not answered
    assert acknowledged <= num_stored <= acknowledged + 4


def rows_of(client: TestClient, kind: str) -> pl.DataFrame:
    """Return all events of a kind, in an order of their own."""
    chunks, unread = events_of(client, kind)
    assert unread == 0
    batches = batches_of(kind, chunks, None, ())
    frame = pl.from_arrow(pa.Table.from_batches(batches, schema_of(kind)).unify_dictionaries())
    assert isinstance(frame, pl.DataFrame)
    names = ["attempt", "rank", "step", *(["sequence", "group"] if kind == "collectives" else [])]
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String)).sort(names)


def same_records(pages: dict[str, Any]) -> dict[str, Any]:
    """Leave the order of records of the same time open."""
    for page, found in pages.items():
        if "/records" in page:
            found["rows"].sort(key=lambda row: json.dumps(row, sort_keys=True))
    return pages


@pytest.fixture
def compacted(in_objects: Settings) -> Settings:
    return replace(in_objects, segments=True, retention_seconds=80_000.0, forget_after_seconds=0.1)


def test_segments_answer_as_chunks_and_any_engine_reads_them(
    compacted: Settings, tmp_path: Path
) -> None:
    with serving(compacted) as client:
        sent(client, RUN)
        before = {kind: rows_of(client, kind) for kind in ("collectives", "steps")}
        pages, chunks = same_records(pages_of(client)), objects_of(client)
        first = client.get(f"/api/v1/runs/{RUN}/chunks", params={"kind": "steps"})
        ids = ids_of(client, "steps")
        age(client, 1)
        service_of(client).retention.round()
        for kind, frame in before.items():
            assert rows_of(client, kind).equals(frame), kind
        assert same_records(pages_of(client)) == pages
        # of each kind one file; what it took the place of is there for pages that began before
        new = objects_of(client) - chunks
        assert {name.split("/")[3] for name in new} == {"collectives", "steps"}
        assert len(new) == 2
        assert chunks < objects_of(client)
        loop = service_of(client).retention
        loop._clock = lambda: time.time_ns() + 3_600 * 10**9
        loop.round()
        assert {name for name in objects_of(client) if "/samples/" not in name} == new
        assert len(ids_of(client, "steps")) < len(ids)
        storage = client.get("/api/v1/storage").json()
        (sizes,) = [run["kinds"] for run in storage["runs"] if run["run_id"] == RUN]
        assert sizes["steps"] == size_of(client, "steps")
        # a program that reads page by page begins again rather than count events twice
        assert first.status_code == 200
        moved = client.get(f"/api/v1/runs/{RUN}/chunks", params={"kind": "steps", "after": ids[0]})
        assert moved.status_code == 409
        assert same_records(pages_of(client)) == pages
        for name in new:
            path = tmp_path / f"{name.split('/')[3]}.parquet"
            path.write_bytes(obstore.get(service_of(client).blobs._store, name).bytes().to_bytes())
    with serving(compacted) as client:  # the analysis reads them too
        service_of(client).analysis.look_now()
        assert same_records(pages_of(client)) == pages
        assert client.delete(f"/api/v1/runs/{RUN}?confirm={RUN}").status_code == 200
        service_of(client).retention.round()
        wait_until(lambda: objects_of(client) == set())
    check_engines(tmp_path / "collectives.parquet", before["collectives"])


def ids_of(client: TestClient, kind: str) -> list[int]:
    table = tables.chunk.c
    with service_of(client).read() as connection:
        found = sa.select(table.id).where(table.run_id == RUN, table.kind == kind)
        return list(connection.scalars(found.order_by(table.id)))


def size_of(client: TestClient, kind: str) -> int:
    """Return the bytes of content of all rows of a kind, counted anew."""
    with service_of(client).read() as connection:
        total = sa.select(sa.func.sum(content_bytes(tables.chunk))).where(
            tables.chunk.c.run_id == RUN, tables.chunk.c.kind == kind
        )
        return int(connection.scalar(total))


def check_engines(path: Path, expected: pl.DataFrame) -> None:
    """Compare the rows and sums that engines read of a file."""
    wanted = (len(expected), int(expected["duration_ns"].sum()) // 1_000)
    asked = "SELECT count(*), sum(duration_us) FROM"
    assert duckdb.sql(f"{asked} '{path}'").fetchall() == [wanted]
    frame = pl.read_parquet(path)
    assert (len(frame), frame["duration_us"].sum()) == wanted
    panda = pd.read_parquet(path)
    assert (len(panda), int(panda["duration_us"].sum())) == wanted
    keys = frame.select("attempt", "rank", "step", pl.col("sequence").fill_null(0))
    assert keys.equals(keys.sort(keys.columns))
    assert pq.read_schema(path).metadata[b"rankscope.version"] == b"1"


def test_chunks_that_went_meanwhile_are_not_revived(compacted: Settings) -> None:
    """Retention came first: nothing of the file is used, and its object is swept."""
    with serving(replace(compacted, segments=False)) as client:
        sent(client, RUN)
        age(client, 1)
        service = service_of(client)
        service.retention.round()
        with service.read() as connection:
            rules = service.retention.rules
            made = list(segments_of(connection, rules, time.time_ns(), service.blobs))
        assert {one.kind for one in made} == {"collectives", "steps"}
        lost = sa.delete(tables.chunk).where(tables.chunk.c.id == made[0].ids[0])
        service.writer.run(lambda unit: unit.connection.execute(lost))
        before = ids_of(client, made[0].kind)
        with pytest.raises(MeanwhileError):
            service.writer.run(lambda unit: put_in_place(unit, made[0]))
        assert ids_of(client, made[0].kind) == before
