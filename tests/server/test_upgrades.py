"""Agents and servers of two versions: what one of them sends is understood, and nothing is lost.

The older versions are real ones, out of the history of this clone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from tests.ports import free_port
from tests.server.conftest import DATABASES, Sender, ServerProcess, log_line, scraped, wait_until
from tests.server.old_versions import extract

# The oldest whose dependencies are those of now, and the last one before the newest tables.
OLDEST_AGENT = "605034e6a4c3f93b5a9c6c25667f50136218180a"
OLDER = "5e40bc12148a6afcfdde993370c1482802c4d12f"
RUN, NAME = "upgraded", "rankscope.db"
STEPS, RANKS = 40, 2
LIMIT_S = 240.0


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Ends the processes of a test."""
    with ExitStack() as stack:
        yield stack


def started(
    stack: ExitStack, folder: Path, *flags: str, older: dict[str, str] | None = None
) -> ServerProcess:
    """Start a server of now, or the older one that variables lead to."""
    server = ServerProcess(folder, *flags, **older or {})
    server.under = ("env",) if older else ()  # a process of its own, with no module of now
    stack.callback(server.close)
    return server.start()


def train(
    stack: ExitStack, folder: Path, url: str, variables: dict[str, str], steps: int = STEPS
) -> subprocess.Popen[str]:
    """Begin a run of two ranks with the agent that variables lead to, or that of now."""
    command = [
        sys.executable, "-m", "rankscope", "run", "--run-id", RUN, "--server", url, "--",
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", "-m", "rankscope_trainer", f"--steps={steps}",
    ]  # fmt: skip
    own = {"HOME": str(folder), "RANKSCOPE_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | own | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    def end() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    stack.callback(end)
    return process


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a run, which must end well."""
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output


def ask(server: ServerProcess, path: str) -> Any:
    reply = httpx.get(f"{server.url}/api/v1/{path}", trust_env=False, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def assert_whole(server: ServerProcess, url: str, steps: int = STEPS) -> None:
    """A server has every step of every rank once in its database, and refused nothing."""
    wait_until(lambda: ask(server, f"runs/{RUN}")["run"]["status"] == "ended", LIMIT_S)
    found = ask(server, f"runs/{RUN}")
    coverage = found["coverage"]
    assert (coverage["registered"], coverage["reporting"]) == (RANKS, RANKS)
    assert (coverage["lost"], coverage["refused"], coverage["missing_batches"]) == (0, 0, 0)
    operations = ask(server, f"runs/{RUN}/collectives")
    assert operations["rows"]
    assert scalar(url, "SELECT sum(\"count\") FROM chunk WHERE kind = 'steps'") == steps * RANKS


def assert_nothing_held(folder: Path) -> None:
    """The collector frees what the server has stored, whichever of them knows watermarks."""
    wait_until(lambda: not list((folder / "runs").rglob("*.batch")), LIMIT_S)


@pytest.mark.multiproc
@pytest.mark.parametrize("commit", [OLDEST_AGENT, OLDER])
def test_an_older_agent_is_understood(commit: str, servers: ExitStack, tmp_path: Path) -> None:
    older = extract(commit, tmp_path / "older")
    server = started(servers, tmp_path)
    finish(train(servers, tmp_path, server.url, older))
    assert_whole(server, f"sqlite:///{tmp_path / NAME}")
    assert_nothing_held(tmp_path)


@pytest.mark.multiproc
def test_an_older_server_understands_the_agent(servers: ExitStack, tmp_path: Path) -> None:
    older = extract(OLDER, tmp_path / "older")
    server = started(servers, tmp_path, older=older)
    finish(train(servers, tmp_path, server.url, {}))
    assert_whole(server, f"sqlite:///{tmp_path / NAME}")
    assert_nothing_held(tmp_path)


def test_of_a_newer_agent_what_is_new_is_left_out_and_counted(sender: Sender) -> None:
    """A field, a kind and a word of the batch that only a later version knows."""
    known = schema.RankRegistered(
        attempt=0, rank=0, time_ns=time.time_ns(), host="node-a", world_size=1, local_rank=0,
        local_world_size=1, node_rank=0, pid=1,
    )  # fmt: skip
    line = {"kind": "log", "attempt": 0, "rank": 0, "time_ns": time.time_ns(), "level": 20,
            "message": "of now", "mood": "good"}  # fmt: skip
    later = {"kind": "weather", "attempt": 0, "rank": 0, "time_ns": 1, "rain": True}
    answer = sender.send(known, line, later, log_line("last"), climate={"of": "a later version"})
    assert [(one["index"], one["field"], one["remedy"]) for one in answer["refused"]] == [
        (2, "kind", "update the server")
    ]
    assert sender.get("/logs")["total"] == 2
    assert sender.get("")["coverage"]["refused"] == 1
    assert scraped(sender.client)["rankscope_ingest_refused_total"] == 1


@pytest.mark.needs("postgres")
def test_an_older_server_leaves_newer_tables_alone(
    request: pytest.FixtureRequest, servers: ExitStack, tmp_path: Path
) -> None:
    older = extract(OLDER, tmp_path / "older")
    url = request.getfixturevalue("postgres").create_migrated()
    server = started(servers, tmp_path, "--database-url", url)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        Sender(client).send(log_line("kept"))  # type: ignore[arg-type]
    command = [sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--database-url", url]
    for words in ((), ("--check",)):
        second = subprocess.run(
            [*command, *words], env=os.environ | older, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        said = second.stdout + second.stderr
        assert second.returncode == 1, said
        assert "a newer version of Rankscope made the tables" in said
        assert "Traceback" not in said
    assert ask(server, "runs/run/logs")["total"] == 1


@pytest.mark.multiproc
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", DATABASES)
def test_nothing_is_lost_where_a_server_is_replaced_by_a_newer_one(
    request: pytest.FixtureRequest, database: str, servers: ExitStack, tmp_path: Path
) -> None:
    """In the middle of a run, on the same data: the collector waits, and sends again."""
    older = extract(OLDER, tmp_path / "older")
    url = f"sqlite:///{tmp_path / NAME}"
    if database != "sqlite":
        url = request.getfixturevalue("postgres").create()
    flags = ("--port", str(free_port()), "--database-url", url)
    before = started(servers, tmp_path, *flags, older=older)
    run = train(servers, tmp_path, before.url, {}, 3 * STEPS)
    wait_until(lambda: steps_seen(before) >= STEPS // 2, LIMIT_S)
    before.end()
    was = scalar(url, "SELECT version_num FROM alembic_version")
    assert run.poll() is None
    after = started(servers, tmp_path, *flags)
    assert scalar(url, "SELECT version_num FROM alembic_version") > was
    finish(run)
    assert_whole(after, url, 3 * STEPS)


def scalar(url: str, query: str) -> Any:
    """Return the one value that a query gives."""
    engine = sa.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool
    )
    with engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def steps_seen(server: ServerProcess) -> int:
    """Return the newest step that a server knows of the run."""
    found = [run for run in ask(server, "runs")["runs"] if run["run_id"] == RUN]
    return (found[0]["step"] or 0) if found else 0
