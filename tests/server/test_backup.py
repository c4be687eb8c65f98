"""A store that is copied in use, lost and restored is the store of that moment."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_server.store.engine import open_engines
from tests.api import get
from tests.command_server import run
from tests.server.conftest import ServerProcess, wait_until
from tests.server.filling import Stream
from tests.server.postgres import Postgres
from tests.server.seed import seed_run

Start = Callable[..., ServerProcess]
PAGES = ("", "/findings", "/map", "/ranks", "/logs", "/collectives", "/errors", "/environment")
AWAY = "postgresql://127.0.0.1:1/x"
DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return run([sys.executable, "-m", "rankscope", *words], env=clean | {"COLUMNS": "200"})


def pages_of(server: ServerProcess, run_id: str) -> list[Any]:
    found = [get(f"{server.url}/api/v1/runs/{run_id}{page}") for page in PAGES]
    found[0].pop("advice_epoch", None)
    return found


def steps_of(server: ServerProcess, run_id: str) -> int:
    step: int = get(f"{server.url}/api/v1/runs/{run_id}")["run"]["step"]
    return step


@pytest.mark.parametrize("database", DATABASES)
def test_a_copy_of_a_store_in_use_brings_it_back(
    start_server: Start, tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    flags: tuple[str, ...] = ("--silent-after-seconds", "3600")
    where: tuple[str, ...] = ("--data-dir", str(tmp_path))
    if database == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        where = ("--database-url", postgres.create_migrated())
        flags += where
    server = start_server(*flags)
    seed_run(server.url, run_id="whole", ranks=2, steps=60)
    wait_until(lambda: get(f"{server.url}/api/v1/runs/whole")["run"]["status"] == "ended")
    stream = Stream(server.url, "being-written")
    stream.start()
    wait_until(lambda: len(stream.acknowledged) > 20)
    acknowledged = len(stream.acknowledged)
    copy = tmp_path / "copy.backup"
    done = command("backup", *where, "--out", str(copy), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] == copy.stat().st_size
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    later = len(stream.acknowledged)
    wait_until(lambda: len(stream.acknowledged) > later + 5)  # ingest did not end with it
    stream.over.set()
    stream.join(60)
    assert stream.refused == []
    before = pages_of(server, "whole")
    server.end(signal.SIGKILL)

    again = command("restore", str(copy), *where)
    assert (again.returncode, "already" in again.stderr) == (2, True), "nothing is replaced unasked"
    if database == "sqlite":
        for path in tmp_path.glob("rankscope.db*"):
            path.unlink()
        restored = command("restore", str(copy), *where)
    else:
        where = ("--database-url", postgres.create())
        flags = (*flags[:2], *where)
        restored = command("restore", str(copy), *where)
    assert restored.returncode == 0, restored.stderr
    server.close()
    server = start_server(*flags)
    assert pages_of(server, "whole") == before
    # all that was acknowledged when the copy began; the stream has a chunk of 20 steps a batch
    assert 20 * acknowledged <= steps_of(server, "being-written") <= 20 * len(stream.acknowledged)


def test_what_is_replaced_is_kept_and_only_without_a_server(
    start_server: Start, tmp_path: Path
) -> None:
    server = start_server()
    where = ("--data-dir", str(tmp_path))
    copy = tmp_path / "copy"
    assert command("backup", *where, "--out", str(copy)).returncode == 0
    seed_run(server.url, run_id="later", ranks=1, steps=20)
    in_use = command("restore", str(copy), *where, "--overwrite")
    assert (in_use.returncode, "is in use by process" in in_use.stderr) == (2, True)
    server.end()
    assert command("restore", str(copy), *where, "--overwrite").returncode == 0
    (kept,) = tmp_path.glob("rankscope.db.before-restore")
    assert runs_in(kept) == {"later"}
    assert runs_in(tmp_path / "rankscope.db") == set()
    once_more = command("restore", str(copy), *where, "--overwrite")
    assert (once_more.returncode, "is there from before" in once_more.stderr) == (2, True)
    assert runs_in(kept) == {"later"}


def runs_in(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    found = {name for (name,) in connection.execute("SELECT run_id FROM run")}
    connection.close()
    return found


def test_what_is_no_copy_is_refused_and_the_store_left(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    for engine in open_engines(f"sqlite:///{data}/rankscope.db", "normal"):
        engine.dispose()
    assert command("backup", "--data-dir", str(data), "--out", str(copy)).returncode == 0
    whole = copy.read_bytes()
    (tmp_path / "damaged").write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    (tmp_path / "text").write_text("no database")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE alembic_version (version_num TEXT)")
    other.execute("INSERT INTO alembic_version VALUES ('9999_of_the_future')")
    other.commit()
    other.close()
    empty = tmp_path / "empty"
    for name, says in (
        ("damaged", "damaged"), ("text", "is no copy that"), ("other", "9999_of_the_future"),
        ("absent", "cannot be restored"),
    ):  # fmt: skip
        done = command("restore", str(tmp_path / name), "--data-dir", str(empty))
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
        assert [path.name for path in empty.iterdir() if ".lock" not in path.name] == []
    for words, says in (
        (("--data-dir", str(empty), "--out", str(tmp_path / "new")), "is not there"),
        (("--data-dir", str(data), "--out", str(copy)), "is there already"),
        (("--data-dir", str(data), "--out", str(tmp_path / "no" / "new")), "is no folder"),
        (("--database-url", AWAY, "--out", str(tmp_path / "new")), "does not answer"),
    ):  # fmt: skip
        done = command("backup", *words)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.needs("postgres")
def test_a_copy_of_one_kind_is_no_store_of_the_other(tmp_path: Path, postgres: Postgres) -> None:
    url, copy = postgres.create_migrated(), tmp_path / "copy"
    done = command("backup", "--database-url", url, "--out", str(copy))
    assert done.returncode == 0, done.stderr
    done = command("restore", str(copy), "--data-dir", str(tmp_path / "data"))
    assert (done.returncode, "is an archive of pg_dump, the store is" in done.stderr) == (2, True)
    copy.write_bytes(copy.read_bytes()[:-2_000])
    empty = postgres.create()
    done = command("restore", str(copy), "--database-url", empty)
    assert (done.returncode, "pg_restore" in done.stderr) == (2, True), done.stderr
    assert command("restore", str(copy), "--database-url", url).returncode == 2
    assert command("backup", "--database-url", empty, "--out", str(tmp_path / "x")).returncode == 2


@pytest.mark.parametrize("database", DATABASES)
def test_objects_are_not_left_out_unasked(
    start_server: Start, tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    """A copy of the database alone brings all back, as long as its objects are there."""
    where: tuple[str, ...] = ("--data-dir", str(tmp_path))
    if database == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        where = ("--database-url", postgres.create_migrated())
    flags = ("--silent-after-seconds", "3600", "--blobs", f"file://{tmp_path}/objects")
    server = start_server(*flags, *where)
    seed_run(server.url, run_id="whole", ranks=2, steps=60)
    wait_until(lambda: get(f"{server.url}/api/v1/runs/whole")["run"]["status"] == "ended")
    copy = tmp_path / "copy.backup"
    refused = command("backup", *where, "--out", str(copy))
    assert (refused.returncode, "--without-objects" in refused.stderr) == (2, True)
    assert not copy.exists()
    done = command("backup", *where, "--out", str(copy), "--without-objects")
    assert done.returncode == 0, done.stderr
    before = pages_of(server, "whole")
    server.end()
    if database == "sqlite":
        for path in tmp_path.glob("rankscope.db*"):
            path.unlink()
    else:
        where = ("--database-url", postgres.create())
    assert command("restore", str(copy), *where).returncode == 0
    server.close()
    assert pages_of(start_server(*flags, *where), "whole") == before
