"""Servers for tests: in this process where that is enough, else a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.wire import schema
from rankscope_server.api.app import create_app
from rankscope_server.report.store import DATABASE
from rankscope_server.settings import Settings
from rankscope_server.store.engine import open_engines
from tests.capabilities import need
from tests.command_server import Forked
from tests.server.object_stores import SeaweedFS
from tests.server.postgres import KIND, Postgres, quick
from tests.server.seed import seed_with

with warnings.catch_warnings():
    # Starlette asks for another HTTP client than the one that its older versions need.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

START_SECONDS = 40.0
DATABASES = ("sqlite", KIND)


class ServerProcess:
    """`rankscope serve` as its own process."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.folder, self.flags = folder, flags
        # pytest keeps the folders of many tests: no reserve unless a test asks for one
        quiet = {"PYTHONWARNINGS": "error", "RANKSCOPE_SERVER_DISK_RESERVE_BYTES": "0"}
        self.environ = os.environ | quiet | environ
        self.under: tuple[str, ...] = ()  # a command that runs it and leaves it its process id
        self.ready = folder / "ready.json"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> ServerProcess:
        command = [
            *self.under, sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--data-dir",
            str(self.folder), "--ready-file", str(self.ready), *self.flags,
        ]  # fmt: skip
        self.ready.unlink(missing_ok=True)  # a killed server leaves it
        self.close()
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        self.process = (
            subprocess.Popen(command, stdout=pipe, stderr=both, text=True, env=self.environ)
            if self.under
            else Forked(command, stdout=pipe, stderr=both, env=self.environ)
        )
        deadline = time.monotonic() + START_SECONDS
        while not self.ready.exists():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        found = json.loads(self.ready.read_text())
        assert found["pid"] == self.process.pid
        self.url = found["url"]
        return self

    def output(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def wait_for_line(self, words: str) -> None:
        """Read what it writes up to a line with some words; pytest bounds how long that takes."""
        assert self.process is not None
        assert self.process.stdout is not None
        assert any(words in line for line in self.process.stdout), f"it ended without {words!r}"

    def end(self, number: int = signal.SIGTERM, timeout: float = 10.0) -> float:
        """Send a signal; return the seconds until the process was gone."""
        assert self.process is not None
        if self.process.poll() is not None:
            return 0.0
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout)
        return time.monotonic() - started

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
            assert self.process.stdout is not None
            self.process.stdout.close()
        self.ready.unlink(missing_ok=True)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start real servers that end with the test; they share one data folder."""
    running: list[ServerProcess] = []

    def start(*flags: str, **environ: str) -> ServerProcess:
        running.append(ServerProcess(tmp_path, *flags, **environ))
        return running[-1].start()

    yield start
    for server in running:
        server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server, and what tests create in it until the fixture ends."""
    need("postgres")
    with quick() as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A store of objects that speaks S3."""
    store = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        yield store.start()
    finally:
        store.close()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty database of each kind; empty: SQLite in the data folder."""
    return url_of(request)


def url_of(request: pytest.FixtureRequest) -> str:
    """Return the address of an empty database of the kind that is the fixture's parameter."""
    if request.param == "sqlite":
        return ""
    server: Postgres = request.getfixturevalue("postgres")
    return server.create_migrated()


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings of a server in this process, which looks only when a test says so."""
    return Settings(
        data_dir=new_data(tmp_path / "data", database_url), database_url=database_url,
        look_seconds=3600.0, disk_reserve_bytes=0,
    )  # fmt: skip


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def new_data(folder: Path, database_url: str = "") -> str:
    """Return a new data folder; SQLite has its tables there: copied, which is quicker."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not database_url:
        (folder / DATABASE).touch(mode=0o600)
        (folder / DATABASE).write_bytes(_empty_database())
    return str(folder)


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for engine in open_engines(f"sqlite:///{folder}/{DATABASE}", "normal"):
            engine.dispose()
        return Path(folder, DATABASE).read_bytes()


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield client


@contextmanager
def serving(folder: Path, database_url: str) -> Iterator[TestClient]:
    """Give a client of a server in this process, with a database that a whole module uses."""
    settings = Settings(
        data_dir=new_data(folder / "data", database_url), database_url=database_url,
        look_seconds=3600.0, disk_reserve_bytes=0,
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield client


class Sender:
    """A producer that talks to a client in this process."""

    def __init__(self, client: TestClient, run_id: str = "run", producer: str = "p") -> None:
        self.client, self.run_id, self.producer = client, run_id, producer
        self.sequence = 0

    def body(self, *records: Any, chunks: Any = (), **changes: Any) -> bytes:
        """Return the next batch; records are structs, or anything that msgpack can say."""
        self.sequence += 1
        values = {
            "schema_version": schema.SCHEMA_VERSION, "run_id": self.run_id,
            "producer": self.producer, "sequence": self.sequence, "host": "node-a",
            "sent_ns": time.time_ns(), "records": list(records), "chunks": list(chunks),
        }  # fmt: skip
        return msgspec.msgpack.encode(values | changes)

    def send(self, *records: Any, **more: Any) -> dict[str, Any]:
        """Send a batch and return the answer, which must be 200."""
        reply = self.client.post("/api/v1/ingest", content=self.body(*records, **more))
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def get(self, path: str, **params: Any) -> Any:
        reply = self.client.get(f"/api/v1/runs/{self.run_id}{path}", params=params)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture
def sender(client: TestClient) -> Sender:
    return Sender(client)


def scraped(client: TestClient) -> dict[str, float]:
    """Return what Prometheus reads at /metrics, by the full name of each series."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def log_line(message: str, **more: Any) -> schema.LogLine:
    values = {"attempt": 0, "rank": 0, "time_ns": 1_700_000_000 * 10**9, "level": 20} | more
    return schema.LogLine(message=message, **values)


@pytest.fixture(scope="module", params=DATABASES)
def seeded(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Sender]:
    """A run of 4 ranks in which rank 2 is slow from step 40 on; for tests that only read."""
    url = url_of(request)
    settings = Settings(
        data_dir=new_data(tmp_path_factory.mktemp("seeded") / "data", url), database_url=url,
        look_seconds=3600.0, disk_reserve_bytes=0,
    )  # fmt: skip

    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield Sender(client, seed_with(poster(client), steps=100, gpus=True))


def poster(client: TestClient) -> Callable[[bytes], None]:
    """Return what sends a packed batch and expects that all of it is taken."""

    def send(body: bytes) -> None:
        reply = client.post("/api/v1/ingest", content=body, headers={"Content-Encoding": "zstd"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["refused"] == []

    return send
