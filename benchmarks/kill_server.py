"""Kill the server at random moments during ingest: is every acknowledged batch there, none twice?

    python benchmarks/kill_server.py              # 20 kills, 4 producers
    python benchmarks/kill_server.py --kills 3 --json

A real server process takes batches from several producers at once. Each producer repeats a batch
until it is acknowledged. The server is killed with SIGKILL and started again on the same data.
At the end the store is compared with what was acknowledged: batches, metric rows, log lines,
chunks, and the sums of the collectives, which would count a batch stored twice. Exit status 1 on
any loss or double.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk

RUN = "kill-test"
EVENTS_PER_BATCH = 50
START_SECONDS = 30.0


@dataclass
class Result:
    """What the bar asks for."""

    kills: int = 0
    producers: int = 0
    acknowledged: int = 0
    stored_before_the_answer: int = 0  # committed, answer lost: the repeat was a duplicate
    failed_sends: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    restart_seconds_median: float = 0.0

    @property
    def passed(self) -> bool:
        return not any(self.lost.values()) and not any(self.twice.values())


class Server:
    """A real server process on one address and one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", str(self.port),
            "--data-dir", str(self.folder), "--log-level", "error",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        url = f"http://127.0.0.1:{self.port}/api/v1/ready"
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except OSError:
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
        self.failed_sends = 0
        self.connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while not self.stop_event.is_set():
            body = make_batch(self.index, self.acknowledged + 1)
            while not self.send(body):
                self.failed_sends += 1
                time.sleep(0.01)
            self.acknowledged += 1
        self.close()

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


def measure(kills: int, num_producers: int, seed: int, folder: Path) -> Result:
    """Run the whole thing."""
    draw = random.Random(seed)
    server, stop = Server(folder), threading.Event()
    server.start()
    producers = [Producer(index, server.port, stop) for index in range(num_producers)]
    started, restarts = time.monotonic(), []
    for producer in producers:
        producer.start()
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(0.05, 1.0))
            server.kill()
            at = time.monotonic()
            server.start()
            restarts.append(time.monotonic() - at)
        time.sleep(0.3)
        stop.set()
        for producer in producers:
            producer.join(30)
        result = Result(
            kills=kills,
            producers=num_producers,
            acknowledged=sum(producer.acknowledged for producer in producers),
            stored_before_the_answer=sum(producer.duplicates for producer in producers),
            failed_sends=sum(producer.failed_sends for producer in producers),
            seconds=time.monotonic() - started,
            restart_seconds_median=float(np.median(restarts)) if restarts else 0.0,
        )
        compare(result, producers, server)
    finally:
        server.kill()
    return result


def compare(result: Result, producers: list[Producer], server: Server) -> None:
    """Compare the store with what was acknowledged."""
    wanted = {
        (producer.index, sequence)
        for producer in producers
        for sequence in range(1, producer.acknowledged + 1)
    }
    database = sqlite3.connect(f"file:{server.folder / 'rankscope.db'}?mode=ro", uri=True)
    stored = {
        "batches": database.execute(
            "SELECT substr(p.producer, 2), b.sequence FROM batch b JOIN producer p"
            " ON p.id = b.producer_id"
        ).fetchall(),
        "metric rows": database.execute("SELECT rank, step FROM metric").fetchall(),
        "chunks": database.execute("SELECT rank, step_lo FROM chunk").fetchall(),
        "log lines": log_lines(server.port),
    }
    for name, rows in stored.items():
        found = [(int(producer), int(sequence)) for producer, sequence in rows]
        result.lost[name] = len(wanted - set(found))
        result.twice[name] = len(found) - len(set(found))
    events = database.execute('SELECT sum("count") FROM op_rollup').fetchone()[0] or 0
    difference = events - len(wanted) * EVENTS_PER_BATCH
    result.lost["events in sums"] = max(-difference, 0)
    result.twice["events in sums"] = max(difference, 0)
    database.close()


def log_lines(port: int) -> list[tuple[str, str]]:
    """Return (producer, sequence) of every stored line, read page by page over HTTP."""
    found: list[tuple[str, str]] = []
    cursor = ""
    while True:
        path = f"/api/v1/runs/{RUN}/logs?fold=false&limit=5000&q=-stream:finding&cursor={cursor}"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            page = json.load(reply)
        for line in page["lines"]:
            _, producer, sequence, _ = line["message"].split("-")
            found.append((producer, sequence))
        cursor = page["next_cursor"]
        if not cursor:
            return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankscope-kill-") as folder:
        result = measure(choices.kills, choices.producers, choices.seed, Path(folder))
    if choices.json:
        print(json.dumps(asdict(result) | {"passed": result.passed}))
    else:
        for name, value in asdict(result).items():
            if not isinstance(value, dict):
                print(f"{name.replace('_', ' '):28} {value:.2f}" if isinstance(value, float)
                      else f"{name.replace('_', ' '):28} {value}")  # fmt: skip
        print(f"{'':28} {'lost':>6} {'twice':>6}")
        for name, lost in result.lost.items():
            print(f"{name:28} {lost:>6} {result.twice[name]:>6}")
        print("passed" if result.passed else "FAILED")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
