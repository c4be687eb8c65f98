"""A server on PostgreSQL: from its start to an answer, and what it says where it cannot serve."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from rankscope_server.cli import EXIT_CANNOT_START, check, serve
from rankscope_server.settings import read
from rankscope_server.store import engine as engine_module
from rankscope_server.store.engine import foresee, open_engines
from tests.capabilities import need, postgres_programs
from tests.server.conftest import Sender, ServerProcess, log_line, wait_until
from tests.server.postgres import Postgres
from tests.server.seed import seed_run, wait_until_judged

Start = Callable[..., ServerProcess]
RUN = "/api/v1/runs/demo-run"


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server of this test alone, which may stop it."""
    need("postgres")
    server = Postgres("-c", "fsync=off")
    yield server.start()
    server.close()


def test_from_an_empty_database_to_an_answer_and_over_a_restart(
    start_server: Start, postgres: Postgres
) -> None:
    url = postgres.create()
    server = start_server("--database-url", url, "--look-seconds", "0.1")
    seed_run(server.url, ranks=4, steps=100)
    wait_until_judged(server.url)
    with httpx.Client(base_url=server.url) as client:
        before = client.get(RUN).json()
        assert before["verdict"]["ranks"] == [2]
        assert client.get(f"{RUN}/logs", params={"q": "parameters"}).json()["total"] > 0
    server.end()
    assert not (server.folder / "rankscope.db").exists()
    server = start_server("--database-url", url, "--look-seconds", "0.1")
    with httpx.Client(base_url=server.url) as client:
        after = client.get(RUN).json()
    assert after["counts"] == before["counts"]
    assert after["verdict"]["what"] == before["verdict"]["what"]


def test_a_database_that_goes_away_is_a_503_and_comes_back_unseen(
    start_server: Start, own_postgres: Postgres
) -> None:
    server = start_server("--database-url", own_postgres.create())
    with httpx.Client(base_url=server.url) as client:

        def send(body: bytes) -> httpx.Response:
            return client.post("/api/v1/ingest", content=body)

        sender = Sender(client)  # type: ignore[arg-type]
        assert send(sender.body(log_line("before"))).status_code == 200
        own_postgres.end(signal.SIGQUIT)
        body = sender.body(log_line("meanwhile"))
        refused = send(body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["what"] == "the database cannot be reached"
        assert refused.json()["error"]["remedy"] == "check that it runs"
        assert client.get("/api/v1/runs").status_code == 503
        own_postgres.start()
        assert send(body).json()["duplicate"] is False
        assert send(body).json()["duplicate"] is True
        assert sender.get("/logs")["total"] == 2


def test_a_database_that_is_away_at_first_is_no_failure_of_the_server(
    start_server: Start, own_postgres: Postgres
) -> None:
    """Who sends is looked up in the database: before any route, and in none of its handlers."""
    server = start_server("--database-url", own_postgres.create())
    own_postgres.end(signal.SIGQUIT)
    with httpx.Client(base_url=server.url) as client:
        for path in ("/api/v1/runs", "/api/v1/settings", "/metrics"):
            reply = client.get(path)
            assert reply.status_code == 503, reply.text
            assert reply.headers["retry-after"]
            assert reply.json()["error"]["remedy"] == "check that it runs"
    server.end()
    output = server.output()
    assert "the analysis of" not in output
    assert "Traceback" not in output, output


def test_an_answer_sees_one_state_of_the_store(postgres: Postgres) -> None:
    writer, reader = open_engines(postgres.create(), "normal")
    runs = sa.text("SELECT count(*) FROM run")
    with reader.connect() as reading:
        assert reading.scalar(runs) == 0
        with writer.begin() as writing:
            writing.execute(sa.text("INSERT INTO run (run_id) VALUES ('x')"))
        assert reading.scalar(runs) == 0
    with reader.connect() as reading:
        assert reading.scalar(runs) == 1
    for engine in (writer, reader):
        engine.dispose()


def test_tables_of_another_version_are_refused_with_a_remedy(
    postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.create_migrated()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    assert serve(["--database-url", url, "--port", "0"]) == EXIT_CANNOT_START
    said = capsys.readouterr().err
    assert "a newer version of Rankscope made the tables of postgresql" in said
    assert "version 9999" in said
    assert "choose another --data-dir or --database-url" in said


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://nobody@127.0.0.1:1/x", "refused"),
        ("postgresql://administrator@/nosuch?host={socket}", 'database "nosuch" does not exist'),
    ],
)
def test_what_cannot_be_reached_is_said_before_anything_starts(
    postgres: Postgres, capsys: pytest.CaptureFixture[str], address: str, said: str
) -> None:
    url = address.format(socket=postgres.url("x").partition("=")[2])
    assert serve(["--database-url", url, "--port", "0"]) == EXIT_CANNOT_START
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.endswith("choose another store with --database-url\n")


def test_an_older_server_is_refused_with_a_remedy(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "OLDEST_POSTGRES", 1_000)
    with pytest.raises(engine_module.StoreVersionError, match="update it to 1000 or newer"):
        open_engines(postgres.create(), "normal")


def test_a_missing_driver_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert serve(["--database-url", "postgresql://db/x", "--port", "0"]) == EXIT_CANNOT_START
    assert "pip install 'rankscope[server,postgres]'" in capsys.readouterr().err


def test_a_check_starts_nothing_and_makes_nothing(
    postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.create()
    assert check(read(["--check", "--database-url", url, "--port", "0"], {})) == 0
    assert "tables of version none, will be brought to" in capsys.readouterr().out
    for engine in open_engines(url, "normal"):
        engine.dispose()
    assert "will be brought" not in foresee(url)


def test_batches_sent_at_once_are_each_stored_once(start_server: Start, postgres: Postgres) -> None:
    server = start_server("--database-url", postgres.create())
    statuses: list[int] = []

    def send(number: int) -> None:
        with httpx.Client(base_url=server.url) as client:
            sender = Sender(client, producer=f"p{number}")  # type: ignore[arg-type]
            for line in range(20):
                body = sender.body(log_line(f"line {line} of {number}"))
                statuses.extend(
                    client.post("/api/v1/ingest", content=body).status_code for _ in range(2)
                )

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/api/v1/runs/run/logs").json()["total"] == 80


def test_a_database_that_only_reads_is_not_ready(
    start_server: Start, own_postgres: Postgres
) -> None:
    """As after a failover to a standby."""
    url = own_postgres.create()
    server = start_server("--database-url", url)
    name = sa.make_url(url).database
    engine = sa.create_engine(
        own_postgres.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )

    def run(statement: str) -> None:
        with engine.connect() as connection:
            connection.execute(sa.text(statement), {"name": name})

    def ready() -> httpx.Response:
        return httpx.get(f"{server.url}/api/v1/ready", timeout=30)

    assert ready().status_code == 200
    setting = f'ALTER DATABASE "{name}" SET default_transaction_read_only'
    run(f"{setting} = on")
    run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
    wait_until(lambda: ready().status_code == 503 and "only" in ready().text)
    assert "writing: the database is read-only" in ready().json()["error"]["what"]
    assert httpx.get(f"{server.url}/api/v1/runs", timeout=30).status_code == 200
    run(f"{setting} = off")  # of new connections: those that only read must be given up
    wait_until(lambda: ready().status_code == 200)


def test_the_document_sets_it_up(own_postgres: Postgres, start_server: Start) -> None:
    """Commands of docs/postgresql.md, on a socket and on loopback in place of the hosts."""
    page = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()
    making, serving, second = (block.split("```")[0] for block in page.split("```sh\n")[1:])
    socket = own_postgres.url("x").partition("=")[2]
    programs = postgres_programs()
    for line in making.splitlines():
        program, *arguments = shlex.split(line)
        subprocess.run(
            [f"{programs}/{program}", *arguments], check=True, capture_output=True,
            env=os.environ | {"PGHOST": socket, "PGUSER": "administrator", "LC_ALL": "C"},
        )  # fmt: skip
    for block in (serving, second):
        (command,) = (line for line in block.splitlines() if line.startswith("rankscope serve "))
        words = [
            word.replace("@db.example/", "@/") + f"?host={socket}" if "db.example" in word else word
            for word in shlex.split(command.replace("10.0.0.12", "127.0.0.1"))[2:]
        ]
        server = start_server(*words)
        assert httpx.get(f"{server.url}/api/v1/ready").json()["status"] == "ok"
    assert "rankscope_servers_up 2.0" in httpx.get(f"{server.url}/metrics").text
