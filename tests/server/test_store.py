"""The store itself: group commit, one server per file, a full disk."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreUnavailableError,
    only_server,
    open_engines,
)
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer
from tests.server.conftest import Sender, TestClient, log_line
from tests.server.postgres import Postgres


@pytest.fixture
def engines(tmp_path: Path, database_url: str) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    pair = open_engines(database_url or f"sqlite:///{tmp_path / 'x.db'}", "normal")
    yield pair
    for engine in pair:
        engine.dispose()


def test_opening_twice_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        for engine in open_engines(f"sqlite:///{tmp_path / 'x.db'}", "full"):
            engine.dispose()
    assert (tmp_path / "x.db").stat().st_mode & 0o077 == 0


def test_one_server_for_one_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    with (
        only_server(url),
        pytest.raises(StoreInUseError, match="in use by process"),
        only_server(url),
    ):
        pass
    with only_server(url):
        pass


def test_what_waits_is_committed_together_and_a_bad_job_fails_alone(
    engines: tuple[sa.Engine, sa.Engine],
) -> None:
    writer = Writer(engines[0])
    commits: list[int] = []
    sa.event.listen(engines[0], "commit", lambda connection: commits.append(1))
    gate = threading.Event()

    def insert(run_id: str) -> object:
        def work(unit: Unit) -> str:
            unit.connection.execute(sa.insert(tables.run).values(run_id=run_id))
            return run_id

        return work

    writer.start()
    blocked = writer.submit(lambda unit: gate.wait(5))
    done: list[str] = []
    futures = [writer.submit(insert(f"r{n}"), done.append) for n in range(10)]  # type: ignore[arg-type]
    gate.set()
    assert [future.result(5) for future in futures] == done == [f"r{n}" for n in range(10)]
    assert blocked.result() is True
    assert len(commits) <= 2
    pair = [writer.submit(insert(name)) for name in ("r3", "new")]  # type: ignore[arg-type]
    with pytest.raises(sa.exc.IntegrityError):
        pair[0].result(5)
    assert pair[1].result(5) == "new"
    writer.close()
    with pytest.raises(StoreUnavailableError, match="stopping"):
        writer.submit(insert("late"))  # type: ignore[arg-type]
    with engines[1].connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(tables.run)) == 11


@pytest.mark.parametrize("stops", [1, 2])
def test_work_of_a_process_that_stood_still_is_repeated_once(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    monkeypatch.setattr("rankscope_server.store.engine.STOPPED_SECONDS", 1.0)
    engines = open_engines(postgres.create_migrated(), "normal")
    writer = Writer(engines[0])
    tries: list[int] = []

    def work(unit: Unit) -> int:
        unit.connection.execute(sa.insert(tables.run).values(run_id="r"))
        tries.append(len(tries))
        if len(tries) <= stops:
            time.sleep(2.0)
        return len(tries)

    writer.start()
    if stops == 1:
        assert writer.run(work) == 2
    else:
        with pytest.raises(StoreUnavailableError):  # 503: the sender repeats
            writer.run(work)
    writer.close()
    with engines[1].connect() as connection:
        stored = connection.scalar(sa.select(sa.func.count()).select_from(tables.run))
    assert (len(tries), stored) == (2, 2 - stops)
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_full_disk_is_a_503_and_reading_goes_on(client: TestClient, sender: Sender) -> None:
    sender.send(log_line("before"))
    service = client.app.state.service  # type: ignore[attr-defined]

    def limit(pages: int) -> None:
        # Outside a transaction and for the writer's connection only.
        raw: sqlite3.Connection = service.writer._engine.raw_connection()
        raw.execute(f"PRAGMA max_page_count={pages}")
        raw.close()

    limit(1)
    # Random text, so that compression does not fit it into what is free.
    body = sender.body(*(log_line(os.urandom(20_000).hex()) for n in range(20)))
    reply = client.post("/api/v1/ingest", content=body)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert "disk" in reply.json()["error"]["what"]
    assert reply.json()["error"]["remedy"]
    assert sender.get("/logs")["total"] == 1
    limit(1 << 30)
    assert client.post("/api/v1/ingest", content=body).json()["duplicate"] is False
    assert sender.get("/logs")["total"] == 21
