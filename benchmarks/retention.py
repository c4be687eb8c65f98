"""Deletes a large run in a real server while small batches come: how long, how much log, how late.

    python benchmarks/retention.py --chunks 25000
    python benchmarks/retention.py --chunks 25000 --database postgresql

Prints one JSON object. Exits with 1 where the file keeps its size, the log grows past its limit,
or a batch is refused meanwhile. PostgreSQL keeps the room of what was deleted for what comes next;
its files and its log are not looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[1]))
from rankscope_server.store import tables
from rankscope_server.store.engine import WAL_LIMIT_BYTES, open_engines
from tests.server.conftest import ServerProcess
from tests.server.filling import Stream
from tests.server.postgres import Postgres

CHUNK_BYTES, PER_BATCH = 20_000, 8
FLAGS = ("--forget-after-seconds", "0.5", "--disk-low-bytes", "0", "--disk-reserve-bytes", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=25_000, help="of the run; 20 kB each")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, database(args.database, Path(name)) as url:
        folder = Path(name)
        make(url, args.chunks)
        server = ServerProcess(folder, *FLAGS, "--database-url", url).start()
        try:
            result = measure(server, folder if args.database == "sqlite" else None)
        finally:
            server.close()
    print(json.dumps({"database": args.database, **result}, indent=1))
    is_kept = args.database == "sqlite" and (
        result["file_bytes_after"] >= result["file_bytes_before"] / 4
        or result["log_bytes_max"] > WAL_LIMIT_BYTES
    )
    sys.exit(1 if is_kept or result["refused"] else 0)


@contextlib.contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """Yield the address of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'rankscope.db'}"
        return
    postgres = Postgres().start()
    try:
        yield postgres.create()
    finally:
        postgres.close()


def make(url: str, chunks: int) -> None:
    """Write a run that has ended straight into the tables: its chunks and its journal."""
    writing, reading = open_engines(url, "normal")
    reading.dispose()
    noise = [os.urandom(CHUNK_BYTES) for _ in range(50)]
    rows = [
        {
            "run_id": "big", "batch_id": n // PER_BATCH, "kind": "collectives", "rank": n % 64,
            "step_hi": n // 64, "time_hi_ns": n, "data": noise[n % 50],
        }
        for n in range(chunks)
    ]  # fmt: skip
    batches = [
        {"producer_id": 1, "sequence": n, "run_id": "big", "records": noise[0][:2_000]}
        for n in range(chunks // PER_BATCH)
    ]
    with writing.begin() as connection:
        run = {"run_id": "big", "status": "ended", "received_ns": 1}
        connection.execute(sa.insert(tables.run), run)
        for first in range(0, chunks, 1_000):
            connection.execute(sa.insert(tables.chunk), rows[first : first + 1_000])
        connection.execute(sa.insert(tables.batch), batches)
    writing.dispose()


def measure(server: ServerProcess, folder: Path | None) -> dict[str, float]:
    """Delete the run; `folder` holds the files of SQLite."""
    stream = Stream(server.url, "live")
    stream.start()
    wait_for(lambda: len(stream.acknowledged) >= 100)
    before, size = [took for _, took in stream.acknowledged], database_bytes(folder)
    largest, over = [0], threading.Event()

    def watch() -> None:
        while folder is not None and not over.wait(0.02):
            largest[0] = max(largest[0], (folder / "rankscope.db-wal").stat().st_size)

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    httpx.delete(f"{server.url}/api/v1/runs/big?confirm=big", timeout=60).raise_for_status()
    answered = time.monotonic()
    wait_for(lambda: ask(server, "deletions/big")["finished_ms"] is not None)
    gone = time.monotonic()
    wait_for(lambda: ask(server, "retention")["progress"]["state"] == "idle")
    ended = time.monotonic()
    over.set()
    stream.end()
    meanwhile = [took for at, took in stream.acknowledged if began < at < ended]
    return {
        "file_bytes_before": size,
        "file_bytes_after": database_bytes(folder),
        "log_bytes_max": largest[0],
        "answered_seconds": answered - began,
        "removed_seconds": gone - began,
        "given_back_seconds": ended - gone,
        "acknowledged_meanwhile": len(meanwhile),
        "ack_p99_ms_before": quantile(before, 0.99) * 1e3,
        "ack_p99_ms_meanwhile": quantile(meanwhile, 0.99) * 1e3,
        "refused": len(stream.refused),
    }


def database_bytes(folder: Path | None) -> int:
    return 0 if folder is None else (folder / "rankscope.db").stat().st_size


def ask(server: ServerProcess, path: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/api/v1/{path}", timeout=60).json()
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int((len(values) - 1) * share)]


if __name__ == "__main__":
    main()
