"""Deletes a large run in a real server while small batches come: how long, how much log, how late.

    python benchmarks/retention.py --chunks 25000

Prints one JSON object. Exits with 1 where the file keeps its size, the log grows past its limit,
or a batch is refused meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from rankscope_server.store.engine import WAL_LIMIT_BYTES, open_engines
from tests.server.conftest import ServerProcess
from tests.server.filling import Stream

CHUNK_BYTES, PER_BATCH = 20_000, 8
FLAGS = ("--forget-after-seconds", "0.5", "--disk-low-bytes", "0", "--disk-reserve-bytes", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=25_000, help="of the run; 20 kB each")
    chunks = parser.parse_args().chunks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, chunks)
        server = ServerProcess(folder, *FLAGS).start()
        try:
            result = measure(server, folder)
        finally:
            server.close()
    print(json.dumps(result, indent=1))
    is_good = (
        result["file_bytes_after"] < result["file_bytes_before"] / 4
        and result["log_bytes_max"] <= WAL_LIMIT_BYTES
        and not result["refused"]
    )
    sys.exit(0 if is_good else 1)


def make(folder: Path, chunks: int) -> None:
    """Write a run that has ended straight into the tables: its chunks and its journal."""
    for engine in open_engines(f"sqlite:///{folder / 'rankscope.db'}", "normal"):
        engine.dispose()
    noise = [os.urandom(CHUNK_BYTES) for _ in range(50)]
    with sqlite3.connect(folder / "rankscope.db") as database:
        database.execute("INSERT INTO run (run_id, status, received_ns) VALUES ('big', 'ended', 1)")
        database.executemany(
            "INSERT INTO chunk (run_id, batch_id, kind, rank, step_hi, time_hi_ns, data)"
            " VALUES ('big', ?, 'collectives', ?, ?, ?, ?)",
            ((n // PER_BATCH, n % 64, n // 64, n, noise[n % 50]) for n in range(chunks)),
        )
        database.executemany(
            "INSERT INTO batch (producer_id, sequence, run_id, records) VALUES (1, ?, 'big', ?)",
            ((n, noise[0][:2_000]) for n in range(chunks // PER_BATCH)),
        )
    database.close()


def measure(server: ServerProcess, folder: Path) -> dict[str, float]:
    stream = Stream(server.url, "live")
    stream.start()
    wait_for(lambda: len(stream.acknowledged) >= 100)
    before, size = [took for _, took in stream.acknowledged], database_bytes(folder)
    largest, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
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


def database_bytes(folder: Path) -> int:
    return (folder / "rankscope.db").stat().st_size


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
