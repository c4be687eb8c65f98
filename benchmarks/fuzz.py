"""Sends a server what no agent would, and looks whether it stays sound.

    python benchmarks/fuzz.py inputs --count 100000        # harmed batches, SQLite
    python benchmarks/fuzz.py inputs --count 100000 --database postgresql
    python benchmarks/fuzz.py inputs --only 4711           # one of them again, shown

`inputs`: batches that were harmed at one layer (tests/server/mutations.py). In the first half the
detectors are off, so that nothing but ingest writes: an input that is refused must leave the
database as it was. In the second half they look at what the first one stored. Now and then a sound
batch must be taken. At the end every stored chunk must decode, every page of every run answer, and
the server's own log be empty. Appends one line to benchmarks/results/fuzz.jsonl; exit status 1
where anything of this failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import psutil
import sqlalchemy as sa

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from rankscope.wire.chunk import decode_chunk
from rankscope_server.store import tables
from tests.server.conftest import ServerProcess
from tests.server.mutations import LAYERS, Mutator, sound_batch
from tests.server.postgres import Postgres

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.jsonl"
RUN, SOUND = "harmed", "sound"
SOUND_EVERY = 500  # inputs
MOST_SHOWN = 20  # failures of one kind
MOST_ABOVE_IDLE_BYTES = 512 << 20
PAGES = (
    "", "/ranks", "/logs", "/throughput", "/collectives", "/errors", "/findings", "/map",
    "/budget", "/environment", "/machines", "/metrics", "/samples?kind=host", "/report", "/advice",
    "/collectives/records", "/agent", "/commands",
)  # fmt: skip
# Nothing but ingest writes.
STILL = ("--look-seconds", "86400", "--retention-seconds", "86400")


@dataclass
class Result:
    """What was sent and what became of it."""

    what: str
    database: str
    seed: int
    inputs: int = 0
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # by layer
    server_errors: list[str] = field(default_factory=list)
    dropped_connections: list[str] = field(default_factory=list)
    refused_that_changed_rows: list[str] = field(default_factory=list)
    sound_batches: int = 0
    sound_batches_refused: list[str] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    wrongly_stored: list[str] = field(default_factory=list)
    pages_asked: int = 0
    pages_failed: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # what the server said of itself: nothing
    idle_bytes: int = 0
    most_above_idle_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the server

    @property
    def passed(self) -> bool:
        failures = (
            self.server_errors, self.dropped_connections, self.refused_that_changed_rows,
            self.sound_batches_refused, self.wrongly_stored, self.pages_failed, self.log,
        )  # fmt: skip
        return not any(failures) and self.most_above_idle_bytes < MOST_ABOVE_IDLE_BYTES


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes

    def decoded(self) -> Any:
        return msgspec.json.decode(self.body)


class Connection:
    """One kept connection to a server, opened again where it broke."""

    def __init__(self, url: str) -> None:
        self._address, self._kept = urlsplit(url).netloc, None
        self._kept: http.client.HTTPConnection | None

    def ask(self, method: str, path: str, body: bytes | None = None, encoding: str = "") -> Reply:
        """Raises OSError, HTTPException where there is no answer."""
        if self._kept is None:
            self._kept = http.client.HTTPConnection(self._address, timeout=120)
        headers = {"Content-Encoding": encoding} if encoding else {}
        try:
            self._kept.request(method, path, body, headers)
            reply = self._kept.getresponse()
            return Reply(reply.status, reply.read())
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None


class Store:
    """The database of the server, looked at from outside."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        self._connection = self.engine.connect()
        is_sqlite = self.engine.dialect.name == "sqlite"
        # both grow by each transaction of somebody else that writes, however small
        self._state = sa.text(
            "PRAGMA data_version" if is_sqlite else "SELECT pg_snapshot_xmax(pg_current_snapshot())"
        )

    def state(self) -> object:
        """Return what is another one after anything was written."""
        return self._connection.scalar(self._state)

    def settle(self, quiet_seconds: float = 2.0) -> None:
        """Wait until nobody has written for so long: a server that starts writes, too."""
        state, since = self.state(), time.monotonic()
        while time.monotonic() - since < quiet_seconds:
            time.sleep(0.1)
            if (after := self.state()) != state:
                state, since = after, time.monotonic()

    def counts(self) -> dict[str, int]:
        """Return how many rows some tables have."""
        parts = (tables.batch, tables.chunk, tables.run)
        return {
            table.name: self._connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for table in parts
        }

    def undecodable(self) -> Iterator[str]:
        """Give what is wrong with each stored chunk that cannot be read."""
        rows = self._connection.execute(sa.select(tables.chunk.c.id, tables.chunk.c.data))
        for row in rows:
            try:
                decode_chunk(row.data)
            except ValueError as error:
                yield f"chunk {row.id}: {error}"

    def close(self) -> None:
        self._connection.close()
        self.engine.dispose()


class Watched:
    """A server process, with its memory and what it says."""

    def __init__(self, process: ServerProcess, result: Result) -> None:
        self.server, self._result, self._over = process, result, threading.Event()
        assert process.process is not None
        self.process = psutil.Process(process.process.pid)
        self._idle = self.process.memory_info().rss
        result.idle_bytes = max(result.idle_bytes, self._idle)
        self._threads = [threading.Thread(target=self._measure), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _measure(self) -> None:
        while not self._over.wait(0.05):
            with contextlib.suppress(psutil.NoSuchProcess):
                above = self.process.memory_info().rss - self._idle
                self._result.most_above_idle_bytes = max(self._result.most_above_idle_bytes, above)

    def _read(self) -> None:
        assert self.server.process is not None
        assert self.server.process.stdout is not None
        for line in self.server.process.stdout:
            if not line.startswith("Rankscope") and len(self._result.log) < 10 * MOST_SHOWN:
                self._result.log.append(line.rstrip())

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = self.process.cpu_times()
            self._result.cpu_seconds += times.user + times.system
        self._over.set()
        code = self.server.process.poll() if self.server.process is not None else None
        if code is not None:
            self._result.log.append(f"the server ended by itself with {code}")
        self.server.end(timeout=60)
        for thread in self._threads:
            thread.join()


class Inputs:
    """Sends harmed batches, by their numbers."""

    def __init__(self, result: Result, seed: int) -> None:
        self.result, self.seed = result, seed
        self.accepted_chunks = self.accepted_batches = 0
        self._sound = 0
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()

    def send(self, server: Watched, numbers: range, store: Store | None) -> None:
        """Send them one after the other; with a store, look at it after each that is refused."""
        connection = Connection(server.server.url)
        mutator = Mutator(self.seed, RUN, "p")
        state = store.state() if store else None
        for number in numbers:
            body = mutator.body(number)
            label = f"{number} ({body.layer})"
            try:
                reply = connection.ask("POST", "/api/v1/ingest", body.data, body.encoding)
            except (OSError, http.client.HTTPException) as error:
                self._note(self.result.dropped_connections, f"{label}: {error!r}")
                if not server.process.is_running():
                    return
                continue
            self._count(body.layer, reply, label)
            if store:
                after = store.state()
                if reply.status != 200 and after != state:
                    self._note(self.result.refused_that_changed_rows, f"{label}: {reply.status}")
                state = after
            if number % SOUND_EVERY == 0:
                self.send_sound(connection)
                state = store.state() if store else None
        connection.close()

    def _count(self, layer: str, reply: Reply, label: str) -> None:
        with self._lock:
            self._counts[layer, reply.status] += 1
            self.result.inputs += 1
        if reply.status >= 500:
            self._note(self.result.server_errors, f"{label}: {reply.body[:300].decode()}")
        elif reply.status == 200 and not (answer := reply.decoded())["duplicate"]:
            with self._lock:
                self.accepted_batches += 1
                self.accepted_chunks += answer["accepted_chunks"]

    def _note(self, failures: list[str], what: str) -> None:
        with self._lock:
            if len(failures) < MOST_SHOWN:
                failures.append(what)

    def send_sound(self, connection: Connection) -> None:
        """Send a batch that nothing harmed: it must be taken whole."""
        with self._lock:
            self._sound += 1
            number = self._sound
        batch = sound_batch(SOUND, "q", number)
        reply = connection.ask("POST", "/api/v1/ingest", msgspec.msgpack.encode(batch))
        is_taken = reply.status == 200 and not reply.decoded()["refused"]
        if is_taken:
            with self._lock:
                self.result.sound_batches += 1
                self.accepted_batches += 1
                self.accepted_chunks += len(batch["chunks"])
        else:
            self._note(self.result.sound_batches_refused, f"{number}: {reply.body[:300].decode()}")

    def close(self) -> None:
        for (layer, status), count in sorted(self._counts.items()):
            self.result.statuses.setdefault(layer, {})[str(status)] = count


def fuzz_inputs(result: Result, count: int, folder: Path, url: str, connections: int) -> None:
    """Send the inputs 1 to `count`; fill the result."""
    address = ("--database-url", url) if url else ()
    outside = url.replace("postgresql:", "postgresql+psycopg:") or f"sqlite:///{folder}/rankscope.db"
    inputs, half, began = Inputs(result, result.seed), count // 2, time.monotonic()
    with running(folder, result, *STILL, *address) as server:
        store = Store(outside)
        store.settle()
        inputs.send(server, range(1, half + 1), store)
        check_counts(result, inputs, store)
    with running(folder, result, "--look-seconds", "0.2", *address) as server:
        parts = [range(half + 1 + n, count + 1, connections) for n in range(connections)]
        threads = [threading.Thread(target=inputs.send, args=(server, part, None)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        inputs.send_sound(Connection(server.server.url))
        wait_for_looks(server)
        check_counts(result, inputs, store)
        result.wrongly_stored += list(store.undecodable())[:MOST_SHOWN]
        ask_pages(result, server)
    store.close()
    inputs.close()
    result.seconds = time.monotonic() - began


@contextlib.contextmanager
def running(folder: Path, result: Result, *flags: str) -> Iterator[Watched]:
    server = Watched(ServerProcess(folder, "--log-level", "warning", *flags).start(), result)
    try:
        yield server
    finally:
        server.end()


def check_counts(result: Result, inputs: Inputs, store: Store) -> None:
    """Compare what is stored with what was acknowledged."""
    result.stored = store.counts()
    for name, wanted in (("batch", inputs.accepted_batches), ("chunk", inputs.accepted_chunks)):
        if result.stored[name] != wanted:
            result.wrongly_stored.append(
                f"{result.stored[name]} rows of {name}, {wanted} were acknowledged"
            )


def wait_for_looks(server: Watched, limit_seconds: float = 120.0) -> None:
    """Wait until the detectors have seen what is stored; a look that fails is in the log."""
    connection, deadline = Connection(server.server.url), time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        text = connection.ask("GET", "/metrics").body.decode()
        if "rankscope_runs_behind 0.0" in text:
            return
        time.sleep(0.5)


def ask_pages(result: Result, server: Watched) -> None:
    """Ask every page of every run."""
    connection = Connection(server.server.url)
    runs = connection.ask("GET", "/api/v1/runs?limit=500").decoded()["runs"]
    for run in runs:
        for page in PAGES:
            path = f"/api/v1/runs/{quote(run['run_id'])}{page}"
            reply = connection.ask("GET", path)
            result.pages_asked += 1
            if reply.status >= 500 and len(result.pages_failed) < MOST_SHOWN:
                result.pages_failed.append(f"{path}: {reply.body[:300].decode()}")
    total = connection.ask("GET", f"/api/v1/runs/{SOUND}/logs?fold=false&q=logger:logger")
    total = total.decoded()["total"]
    if total != result.sound_batches:
        result.wrongly_stored.append(f"{total} sound lines, {result.sound_batches} were sent")


@contextlib.contextmanager
def database(name: str) -> Iterator[str]:
    """Give the address of an empty database; empty: SQLite in the data folder."""
    if name == "sqlite":
        yield ""
        return
    server = Postgres("-c", "fsync=off", "-c", "autovacuum=off").start()
    try:
        yield server.create()
    finally:
        server.close()


def show(number: int, seed: int) -> None:
    """Print one input and what ingest makes of it."""
    from rankscope_server.ingest.batch import validate_batch

    body = Mutator(seed, RUN, "p").body(number)
    print(body.layer, body.encoding or "plain", len(body.data), "bytes", body.data[:2_000])
    print(validate_batch(body.data, body.encoding, 64 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("inputs",))
    parser.add_argument("--count", type=int, default=10 * len(LAYERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--only", type=int, help="show this input alone, and send nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, keep nothing")
    choices = parser.parse_args()
    if choices.only is not None:
        show(choices.only, choices.seed)
        return 0
    result = Result(choices.what, choices.database, choices.seed)
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-fuzz-") as folder,
        database(choices.database) as url,
    ):
        fuzz_inputs(result, choices.count, Path(folder), url, choices.connections)
    line = json.dumps({**asdict(result), "passed": result.passed})
    print(line if choices.json else json.dumps(json.loads(line), indent=1))
    if not choices.json:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
