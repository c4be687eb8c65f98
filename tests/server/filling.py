"""Batches that fill a disk: valid chunks that do not compress."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from rankscope.node.offsets import Offsets
from rankscope.node.upload.server import Server
from rankscope.node.upload.spool import Spool, SpoolHeader
from rankscope.node.upload.uploader import Uploader
from rankscope.wire import schema, zstd
from rankscope.wire.chunk import encode_chunk

COUNT = 1_000  # steps of a chunk


def chunk(number: int, rank: int = 0, count: int = COUNT) -> schema.Chunk:
    """Return about 60 bytes of noise for each of `count` steps."""
    chance = np.random.default_rng(number)
    columns: dict[str, Any] = {name: np.zeros(count, np.int64) for name in schema.STEP_COLUMNS}
    low = number * count
    columns["step"] = np.arange(low + 1, low + count + 1)
    start = time.time_ns() - count * 1_000_000
    columns["started_ns"] = start + np.arange(count) * 1_000_000
    for name in schema.STEP_COLUMNS[2:14]:
        columns[name] = chance.integers(0, 1 << 40, count)
    return schema.Chunk(
        kind="steps", attempt=0, rank=rank, host="node-a", count=count, time_lo_ns=start,
        time_hi_ns=start + count * 1_000_000, step_lo=low + 1, step_hi=low + count,
        data=encode_chunk(columns),
    )  # fmt: skip


def batch(run_id: str, sequence: int, *chunks: schema.Chunk, records: Any = ()) -> bytes:
    """Return the body of a batch."""
    values = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": run_id, "producer": f"p-{run_id}",
        "sequence": sequence, "host": "node-a", "sent_ns": time.time_ns(),
        "records": list(records), "chunks": list(chunks),
    }  # fmt: skip
    return msgspec.msgpack.encode(values)


def fill(url: str, run_id: str, batches: int, chunks: int = 5) -> None:
    """Send a run of so many batches, and its end."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        begun = schema.RunStarted(
            attempt=0, rank=-1, time_ns=time.time_ns(), name=run_id, command=["x"], world_size=1
        )
        for number in range(batches):
            made = [chunk(number * chunks + part) for part in range(chunks)]
            body = batch(run_id, number + 1, *made, records=[begun] if number == 0 else ())
            client.post("/api/v1/ingest", content=body).raise_for_status()


class Stream(threading.Thread):
    """Sends a small batch every few milliseconds, each until it is acknowledged."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(daemon=True)
        self.url, self.run_id = url, run_id
        self.acknowledged: list[tuple[float, float]] = []  # when, and how long it took
        self.refused: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        """Send until it is told that it is over."""
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            sequence = 1
            while not self.over.is_set():
                body = batch(self.run_id, sequence, chunk(sequence, count=20))
                began = time.monotonic()
                reply = client.post("/api/v1/ingest", content=body)
                if reply.status_code == 200:
                    self.acknowledged.append((time.monotonic(), time.monotonic() - began))
                    sequence += 1
                else:
                    self.refused.append(reply.status_code)
                self.over.wait(0.005)

    def end(self) -> None:
        """Stop."""
        self.over.set()
        self.join(30)


class Collector:
    """The collector's own spool and upload; `put` is what it does with a batch."""

    def __init__(self, url: str, folder: Path, run_id: str = "live") -> None:
        self.run_id = run_id
        self.spool = Spool(folder, 1 << 30)
        self.refused: list[str] = []
        self.number = 0
        server = Server(url, "", timeout_seconds=30.0)
        self.uploader = Uploader(server, self.spool, lambda _, why: self.refused.append(why))
        self.uploader.start()

    def put(self, size: int = 3) -> None:
        self.number += 1
        made = [chunk(self.number * size + part) for part in range(size)]
        body = zstd.pack(batch(self.run_id, self.number, *made))
        header = SpoolHeader("p", self.number, 1, Offsets("p", self.number))
        self.spool.offer(self.spool.write(header, body))

    @property
    def num_waiting(self) -> int:
        return self.spool.waiting()[0]
