"""Kill the server at random moments during ingest: is every acknowledged batch there, none twice?

    python benchmarks/kill_server.py                            # 200 kills, SQLite
    python benchmarks/kill_server.py --database postgresql
    python benchmarks/kill_server.py --database postgresql --victim database --kills 10
    python benchmarks/kill_server.py --kills 3 --json           # one round that is not kept

A real server process takes batches from several producers at once. Each producer repeats a batch
until it is acknowledged. The server is killed with SIGKILL and started again on the same data; with
`--victim database` it is PostgreSQL that is stopped in the middle (`pg_ctl stop -m immediate`) and
started again. Every second kill falls at any moment, the others after the store was seen to be
written, as many milliseconds later as a commit may take: before, in and after it.

At the end of a round the store is compared with what was acknowledged: batches, metric rows, log
lines, chunks, and the sums of the collectives, which would count a batch stored twice. Each round
of 20 kills has an empty store and is a line of benchmarks/results/kill_server.jsonl; an interrupted
run is resumed after the last one. Exit status 1 if a batch is lost or stored twice.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from tests.ports import free_port
from tests.server.postgres import Postgres
from tests.server.wal import read_wal

RESULTS = Path(__file__).parent / "results" / "kill_server.jsonl"
RUN = "kill-test"
EVENTS_PER_BATCH = 50
START_SECONDS = 60.0
KILLS_PER_ROUND = 20
LONGEST_COMMIT_MS = 40.0


@dataclass
class Result:
    """What the bar asks for."""

    database: str = "sqlite"
    victim: str = "server"
    seed: int = 1
    kills: int = 0
    kills_in_a_commit: int = 0  # a transaction that did not end was in SQLite's log
    producers: int = 0
    acknowledged: int = 0
    stored_before_the_answer: int = 0  # committed, answer lost: the repeat was a duplicate
    failed_sends: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # answers other than 200, by status
    failures: list[str] = field(default_factory=list)  # that the server logged
    lost: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    restart_seconds_median: float = 0.0

    @property
    def passed(self) -> bool:
        is_true = not any(self.lost.values()) and not any(self.twice.values())
        return is_true and self.refused.keys() <= {"503", "507"} and not self.failures


class Server:
    """A real server process on one address and one data folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags, self.log = folder, flags, folder / "log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, path: str = "ready") -> None:
        """Start it; return once this path is answered with 200. Raises RuntimeError."""
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", str(self.port),
            "--data-dir", str(self.folder), "--log-level", "error",
            "--disk-reserve-bytes", "0", *self.flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Producer(threading.Thread):
    """Sends batch after batch, each until it is acknowledged."""

    def __init__(self, index: int, port: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.index, self.port, self.stop_event = index, port, stop
        self.acknowledged = 0
        self.duplicates = 0
        self.gives_up = False
        self.failed_sends = 0
        self.refused: Counter[str] = Counter()
        self.connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while not self.stop_event.is_set():
            body = make_batch(self.index, self.acknowledged + 1)
            while not self.send(body):
                self.failed_sends += 1
                if self.gives_up:
                    return
                time.sleep(0.01)
            self.acknowledged += 1
        self.close()

    def give_up(self) -> None:
        """Repeat the batch in work no more: the server does not come back."""
        self.gives_up = True

    def send(self, body: bytes) -> bool:
        """Return whether the server acknowledged."""
        try:
            if self.connection is None:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            self.connection.request("POST", "/api/v1/ingest", body)
            reply = self.connection.getresponse()
            answer = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError):
            self.close()
            return False
        if reply.status != 200:
            self.refused[str(reply.status)] += 1
            return False
        self.duplicates += bool(answer["duplicate"])
        return True

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def make_batch(producer: int, sequence: int) -> bytes:
    """Return a batch with a metric, a log line and a chunk, all named by the sequence."""
    now = time.time_ns()
    common = {"attempt": 0, "rank": producer, "time_ns": now}
    metric = schema.Metrics(step=sequence, values={"sent": float(sequence)}, **common)
    line = schema.LogLine(level=20, message=f"line-{producer}-{sequence}-end", **common)
    fill = np.zeros(EVENTS_PER_BATCH, np.int64)
    columns = {
        name: ["all_reduce" if name == "operation" else "g"] * EVENTS_PER_BATCH
        if name in schema.STRING_COLUMNS
        else fill + 1_000
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns |= {"arrived_ns": fill + now, "step": fill + sequence, "state": fill + schema.ENDED}
    chunk = schema.Chunk(
        kind="collectives", attempt=0, rank=producer, host="bench", count=EVENTS_PER_BATCH,
        time_lo_ns=now, time_hi_ns=now, data=encode_chunk(columns),
    )  # fmt: skip
    return schema.encode(
        schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=RUN, producer=f"p{producer}",
            sequence=sequence, host="bench", sent_ns=now, chunks=[chunk],
            records=[msgspec.Raw(schema.encode(record)) for record in (metric, line)],
        )
    )  # fmt: skip


class Store:
    """The database under a server: seen from outside, killed where it is a server itself."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rankscope.db"
        self.flags: tuple[str, ...] = ()
        self.url = f"sqlite:///{self.file}"

    def written(self) -> object:
        """Return what is another one after something was written."""
        try:
            return self.file.with_name("rankscope.db-wal").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def was_cut_in_a_commit(self) -> bool:
        """Return whether the server was killed while it wrote a transaction."""
        return read_wal(self.file).is_cut_in_a_transaction

    def kill(self) -> None:
        raise RuntimeError("SQLite is no server")

    def start(self) -> None:
        """Start it again."""

    def close(self) -> None:
        """End it."""


class PostgresStore(Store):
    """A PostgreSQL server of our own, with all its syncs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server = Postgres().start()
        url = self._server.create()
        self.flags = ("--database-url", url)
        self.url = url.replace("postgresql:", "postgresql+psycopg:")
        self._engine = sa.create_engine(self.url, isolation_level="AUTOCOMMIT", pool_size=1)
        self._position = sa.text("SELECT pg_current_wal_insert_lsn()")

    def written(self) -> object:
        with contextlib.suppress(sa.exc.DBAPIError), self._engine.connect() as connection:
            return connection.scalar(self._position)
        return None

    def was_cut_in_a_commit(self) -> bool:
        return False  # its log does not show that

    def kill(self) -> None:
        self._server.end(signal.SIGQUIT)  # what `pg_ctl stop -m immediate` sends

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._engine.dispose()
        self._server.close()


STORES: dict[str, Callable[[Path], Store]] = {"sqlite": Store, "postgresql": PostgresStore}


def measure(result: Result, folder: Path) -> None:
    """Run one round: fill the result."""
    store = STORES[result.database](folder)
    server = Server(folder, *store.flags)
    try:
        server.start()
        kill_and_compare(result, server, store)
    finally:
        server.kill()
        store.close()


def kill_and_compare(result: Result, server: Server, store: Store) -> None:
    draw, stop = random.Random(result.seed), threading.Event()
    producers = [Producer(index, server.port, stop) for index in range(result.producers)]
    started, restarts = time.monotonic(), []
    for producer in producers:
        producer.start()
    for number in range(result.kills):
        wait_for_moment(draw, store, in_commit=number % 2 == 1)
        victim: Server | Store = store if result.victim == "database" else server
        victim.kill()
        result.kills_in_a_commit += store.was_cut_in_a_commit()
        at = time.monotonic()
        victim.start()
        restarts.append(time.monotonic() - at)
    time.sleep(0.3)
    stop.set()
    for producer in producers:
        producer.join(60)
    result.acknowledged = sum(producer.acknowledged for producer in producers)
    result.stored_before_the_answer = sum(producer.duplicates for producer in producers)
    result.failed_sends = sum(producer.failed_sends for producer in producers)
    result.refused = dict(sum((producer.refused for producer in producers), Counter()))
    lines = server.log.read_text().splitlines()
    result.failures = [line for line in lines if " ERROR " in line or "Error: " in line][:20]
    result.seconds = time.monotonic() - started
    result.restart_seconds_median = float(np.median(restarts)) if restarts else 0.0
    compare(result, producers, server, store)


def wait_for_moment(draw: random.Random, store: Store, in_commit: bool) -> None:
    """Wait for any moment, or for one in the life of a commit."""
    time.sleep(draw.uniform(0.05, 1.0))
    if in_commit:
        before, deadline = store.written(), time.monotonic() + 5
        while store.written() == before and time.monotonic() < deadline:
            time.sleep(0.0001)
        time.sleep(draw.uniform(0.0, LONGEST_COMMIT_MS / 1e3))


def compare(result: Result, producers: list[Producer], server: Server, store: Store) -> None:
    """Compare the store with what was acknowledged."""
    wanted = {
        (producer.index, sequence)
        for producer in producers
        for sequence in range(1, producer.acknowledged + 1)
    }
    for name, found in stored_batches(store.url, server.port).items():
        result.lost[name] = len(wanted - set(found))
        result.twice[name] = len(found) - len(set(found)) + len(set(found) - wanted)
    difference = stored_events(store.url) - len(wanted) * EVENTS_PER_BATCH
    result.lost["events in sums"] = max(-difference, 0)
    result.twice["events in sums"] = max(difference, 0)


def stored_batches(url: str, port: int) -> dict[str, list[tuple[int, int]]]:
    """Return (producer, sequence) of what is stored of each batch, by what it is."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:

        def rows(query: str) -> list[Any]:
            return list(connection.execute(sa.text(query)))

        found = {
            "batches": [
                (producer[1:], sequence)
                for producer, sequence in rows(
                    "SELECT p.producer, b.sequence FROM batch b"
                    " JOIN producer p ON p.id = b.producer_id"
                )
            ],
            "metric rows": rows("SELECT rank, step FROM metric"),
            "chunks": rows("SELECT rank, step_lo FROM chunk"),
            "log lines": log_lines(port),
        }
    engine.dispose()
    return {
        name: [(int(producer), int(sequence)) for producer, sequence in pairs]
        for name, pairs in found.items()
    }


def stored_events(url: str) -> int:
    """Return how many collectives the sums count."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        events = int(connection.scalar(sa.text('SELECT sum("count") FROM op_rollup')) or 0)
    engine.dispose()
    return events


def log_lines(port: int) -> list[tuple[str, str]]:
    """Return (producer, sequence) of every stored line, read page by page over HTTP."""
    found: list[tuple[str, str]] = []
    cursor = ""
    while True:
        path = f"/api/v1/runs/{RUN}/logs?fold=false&limit=5000&q=-stream:finding&cursor={cursor}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
                page = json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == HTTPStatus.NOT_FOUND:  # no batch of this run is there
                    return found
                raise
        for line in page["lines"]:
            _, producer, sequence, _ = line["message"].split("-")
            found.append((producer, sequence))
        cursor = page["next_cursor"]
        if not cursor:
            return found


def kept(database: str, victim: str) -> list[dict[str, Any]]:
    """Return the rounds that were run already."""
    if not RESULTS.exists():
        return []
    rounds = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [one for one in rounds if (one["database"], one["victim"]) == (database, victim)]


def kills_of(rounds: list[dict[str, Any]]) -> int:
    return sum(one["kills"] for one in rounds)


def run_round(result: Result) -> None:
    with tempfile.TemporaryDirectory(prefix="rankscope-kill-") as folder:
        measure(result, Path(folder))


def line_of(result: Result) -> str:
    return json.dumps(asdict(result) | {"passed": result.passed})


def show(rounds: list[dict[str, Any]]) -> bool:
    """Print the sums of all rounds; return whether nothing was lost, and nothing stored twice."""
    for name in ("kills", "kills_in_a_commit", "acknowledged", "stored_before_the_answer",
                 "failed_sends", "seconds"):  # fmt: skip
        print(f"{name.replace('_', ' '):28} {sum(one[name] for one in rounds):>8.0f}")
    print(f"{'':28} {'lost':>8} {'twice':>8}")
    for name in rounds[0]["lost"]:
        lost, twice = (sum(one[what][name] for one in rounds) for what in ("lost", "twice"))
        print(f"{name:28} {lost:>8} {twice:>8}")
    has_passed = all(one["passed"] for one in rounds)
    print("refused", dict(sum((Counter(one["refused"]) for one in rounds), Counter())))
    print("passed" if has_passed else "FAILED")
    return has_passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=STORES, default="sqlite")
    parser.add_argument("--victim", choices=("server", "database"), default="server")
    parser.add_argument("--json", action="store_true", help="one round, printed, not kept")
    choices = parser.parse_args()
    if choices.victim == "database" and choices.database == "sqlite":
        parser.error("SQLite is no server; add --database postgresql")
    result = Result(choices.database, choices.victim, choices.seed, producers=choices.producers)
    if choices.json:
        result.kills = choices.kills
        run_round(result)
        print(line_of(result))
        return 0 if result.passed else 1
    while (done := kills_of(kept(choices.database, choices.victim))) < choices.kills:
        result.seed, result.kills = choices.seed + done, min(KILLS_PER_ROUND, choices.kills - done)
        run_round(result)
        with RESULTS.open("a") as file:
            file.write(line_of(result) + "\n")
        result = Result(choices.database, choices.victim, producers=choices.producers)
    return 0 if show(kept(choices.database, choices.victim)) else 1


if __name__ == "__main__":
    sys.exit(main())
