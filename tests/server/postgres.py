"""A PostgreSQL server of the system's packages on a socket of its own, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from rankscope_server.store.engine import open_engines
from tests.capabilities import NOBODY, is_root, postgres_programs

START_SECONDS = 60.0
KIND = "postgresql"  # among the parameters of a test, where a server is its database
OWNER = "administrator"
TEMPLATE = "migrated"
_QUICK = ("-c", "fsync=off", "-c", "max_connections=300")
_shared: Postgres | None = None  # one that all forked processes of tests use


class Postgres:
    """A server that listens on no port; `close` ends it and removes its data."""

    def __init__(self, *options: str, folder: Path | None = None) -> None:
        """`options` are flags of `postgres`; data in `folder` outlives this server."""
        self._bin = postgres_programs() or Path()
        # the address of a socket has at most 107 characters
        self._socket = Path(tempfile.mkdtemp(prefix="rankscope-pg-"))
        self.folder = folder or self._socket / "data"
        self._options = options
        self._numbers = itertools.count()
        self._created: list[str] = []
        self._user = NOBODY if is_root() else ()  # it refuses to be root
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Postgres:
        self.folder.mkdir(exist_ok=True, parents=True)
        self._own(self._socket)
        self._own(self.folder)
        if not (self.folder / "PG_VERSION").exists():
            self._run("initdb", "-D", self.folder, "-U", OWNER, "-A", "trust",
                      "-E", "UTF8", "--no-sync", "--locale=C")  # fmt: skip
        log = (self._socket / "log").open("wb")
        command = [
            *self._user, self._bin / "postgres", "-D", self.folder, "-k", self._socket,
            "-c", "listen_addresses=", *self._options,
        ]  # fmt: skip
        with log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd="/", env=self._environ()
            )
        deadline = time.monotonic() + START_SECONDS
        engine = sa.create_engine(self.url("postgres"), poolclass=sa.NullPool)
        while True:
            with contextlib.suppress(sa.exc.OperationalError), engine.connect():
                return self
            assert self._process.poll() is None, (self._socket / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL did not start"
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, database: str) -> str:
        """Return the address of a database, as `--database-url` takes it."""
        return f"postgresql://{OWNER}@/{database}?host={self._socket}"

    def create(self) -> str:
        """Return the address of a new empty database."""
        return self.url(self._create(""))

    def create_migrated(self) -> str:
        """Return the address of a new database that has the tables: a copy, which is quicker."""
        if TEMPLATE not in self._execute("SELECT datname FROM pg_database"):
            self.create_template()
        return self.url(self._create(f" TEMPLATE {TEMPLATE}"))

    def create_template(self) -> None:
        """Create the database that `create_migrated` copies."""
        self._execute(f"CREATE DATABASE {TEMPLATE}")
        for engine in open_engines(self.url(TEMPLATE), "normal"):
            engine.dispose()

    def drop_created(self) -> None:
        """Drop the databases that this process created, whoever may still be connected."""
        for name in self._created:
            self._execute(f"DROP DATABASE {name} WITH (FORCE)")
        self._created.clear()

    def end(self, number: int = signal.SIGINT) -> None:
        """Stop it, by default at once and in order; its data stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(30)

    def close(self) -> None:
        self.end(signal.SIGQUIT)
        shutil.rmtree(self._socket, ignore_errors=True)  # with the data, if it has no other folder

    def _create(self, of: str) -> str:
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name}{of}")
        self._created.append(name)
        return name

    def _execute(self, statement: str) -> list[object]:
        engine = sa.create_engine(
            self.url("postgres"), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            done = connection.exec_driver_sql(statement)
            return list(done.scalars()) if done.returns_rows else []

    def _own(self, folder: Path) -> None:
        if self._user:
            shutil.chown(folder, 65534, 65534)

    def _run(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [*self._user, self._bin / program, *arguments], capture_output=True, text=True,
            cwd="/", env=self._environ(), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self._socket), "LC_ALL": "C"}


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Within, `quick` is one server for this process and all that it forks."""
    global _shared
    _shared = Postgres(*_QUICK).start()
    try:
        _shared.create_template()
        yield
    finally:
        _shared.close()
        _shared = None


@contextlib.contextmanager
def quick() -> Iterator[Postgres]:
    """Yield a server that does not wait for disks; what was created is gone afterwards."""
    if _shared is None:
        server = Postgres(*_QUICK)
        try:
            yield server.start()
        finally:
            server.close()
        return
    try:
        yield _shared
    finally:
        _shared.drop_created()
