"""Harmed batches for ingest: nothing of a refused one is stored, and the server stays sound."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import sqlalchemy as sa

from benchmarks.fuzzing.server import MOST_SHOWN, Connection, Reply, Result, Watched, running
from rankscope.wire.chunk import decode_chunk
from rankscope_server.ingest.batch import validate_batch
from rankscope_server.store import tables
from tests.server.mutations import Mutator, sound_batch

RUN, SOUND = "harmed", "sound"
SOUND_EVERY = 500  # inputs
PAGES = (
    "", "/ranks", "/logs", "/throughput", "/collectives", "/errors", "/findings", "/map",
    "/budget", "/environment", "/machines", "/metrics", "/samples?kind=host", "/report", "/advice",
    "/collectives/records", "/agent", "/commands",
)  # fmt: skip
# Nothing but ingest writes.
STILL = ("--look-seconds", "86400", "--retention-seconds", "86400")


class Store:
    """The database of the server, looked at from outside."""

    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        self._connection = self.engine.connect()
        is_sqlite = self.engine.dialect.name == "sqlite"
        # both grow with each transaction that another client writes, however small
        self._state = sa.text(
            "PRAGMA data_version" if is_sqlite else "SELECT pg_snapshot_xmax(pg_current_snapshot())"
        )

    def state(self) -> object:
        """Return what is another one after anything was written."""
        return self._connection.scalar(self._state)

    def settle(self, quiet_seconds: float = 2.0) -> None:
        """Wait until no client has written for so long: a server writes when it starts, too."""
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
    outside = (
        url.replace("postgresql:", "postgresql+psycopg:") or f"sqlite:///{folder}/rankscope.db"
    )
    inputs, half, began = Inputs(result, result.seed), count // 2, time.monotonic()
    with running(folder, result, *STILL, *address) as server:
        store = Store(outside)
        store.settle()
        inputs.send(server, range(1, half + 1), store)
        check_counts(result, inputs, store)
    with running(folder, result, "--look-seconds", "0.2", *address) as server:
        parts = [range(half + 1 + n, count + 1, connections) for n in range(connections)]
        threads = [
            threading.Thread(target=inputs.send, args=(server, part, None)) for part in parts
        ]
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
            result.pages_asked += 1
            if (why := failure_of(connection, path)) and len(result.pages_failed) < MOST_SHOWN:
                result.pages_failed.append(f"{path}: {why}")
    total = connection.ask("GET", f"/api/v1/runs/{SOUND}/logs?fold=false&q=logger:logger")
    total = total.decoded()["total"]
    if total != result.sound_batches:
        result.wrongly_stored.append(f"{total} sound lines, {result.sound_batches} were sent")


def failure_of(connection: Connection, path: str) -> str:
    """Return why a page is not answered; empty if it is."""
    began = time.monotonic()
    try:
        reply = connection.ask("GET", path)
    except (OSError, http.client.HTTPException) as error:
        return f"{error!r} after {time.monotonic() - began:.1f} s"
    return reply.body[:300].decode() if reply.status >= 500 else ""


def show(number: int, seed: int) -> None:
    """Print one input and what ingest makes of it."""
    body = Mutator(seed, RUN, "p").body(number)
    print(body.layer, body.encoding or "plain", len(body.data), "bytes", body.data[:2_000])
    print(validate_batch(body.data, body.encoding, 64 << 20))
