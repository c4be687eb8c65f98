"""A real server process that can be killed, and what its database and its API say is stored."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.wire.chunk import by_rank, decode_chunk
from tests.command_server import Forked
from tests.ports import free_port

START_SECONDS = 60.0


@dataclass
class Stored:
    """What the server has of one run, each thing with the number of times it is there."""

    collectives: Counter[tuple[int, str, int]] = field(default_factory=Counter)  # rank, group, seq
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    in_sums: int = 0  # collectives in the sums per operation, which count a repeat twice
    ended: list[int] = field(default_factory=list)
    losses: dict[tuple[str, str], int] = field(default_factory=dict)
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)  # last sequence, received
    of_events: set[str] = field(default_factory=set)  # those that sent more than went past others
    bytes_received: int = 0
    chunk_bytes: int = 0


class RealServer:
    """One address and one data folder; `start` and `kill` as often as wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: Forked | None = None

    def start(self) -> None:
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", str(self.port),
            "--data-dir", str(self.folder), "--log-level", "error",
        ]  # fmt: skip
        self._process = Forked(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/ready", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Read the database as it lies on the disk."""
        database = sqlite3.connect(f"file:{self.folder / 'rankscope.db'}?mode=ro", uri=True)
        try:
            return database.execute(sql, values).fetchall()
        finally:
            database.close()

    def num_ended(self, run_id: str) -> int:
        sql = "SELECT count(*) FROM rank WHERE run_id = ? AND ended_ns IS NOT NULL"
        return int(self.query(sql, run_id)[0][0])

    def num_batches(self, run_id: str) -> int:
        return int(self.query("SELECT count(*) FROM batch WHERE run_id = ?", run_id)[0][0])

    def stored(self, run_id: str) -> Stored:
        """Return everything of a run."""
        stored = Stored()
        for kind, rank, data in self.query(
            "SELECT kind, rank, data FROM chunk WHERE run_id = ?", run_id
        ):
            stored.chunk_bytes += len(data)
            for one, columns in by_rank(rank, decode_chunk(data)):
                if kind == "collectives":
                    pairs = zip(columns["group"], columns["sequence"], strict=True)
                    stored.collectives.update((one, str(g), int(s)) for g, s in pairs)
                elif kind == "steps":
                    stored.steps.update((one, int(step)) for step in columns["step"])
        stored.lines.update(self._log_lines(run_id))
        sums = self.query('SELECT sum("count") FROM op_rollup WHERE run_id = ?', run_id)
        stored.in_sums = int(sums[0][0] or 0)
        sql = "SELECT rank FROM rank WHERE run_id = ? AND ended_ns IS NOT NULL ORDER BY rank"
        stored.ended = [rank for (rank,) in self.query(sql, run_id)]
        for source, reason, count in self.query(
            "SELECT source, reason, sum(count) FROM loss WHERE run_id = ? GROUP BY 1, 2", run_id
        ):
            stored.losses[source, reason] = int(count)
        of_events = (
            "SELECT 1 FROM batch JOIN chunk ON chunk.batch_id = batch.id"
            " WHERE batch.producer_id = producer.id"
        )
        for producer, last, received, size, has_events in self.query(
            f"SELECT producer, last_sequence, received, bytes, EXISTS ({of_events})"  # noqa: S608
            " FROM producer WHERE run_id = ?",
            run_id,
        ):
            stored.producers[producer] = (int(last), int(received))
            stored.bytes_received += int(size)
            if has_events:
                stored.of_events.add(producer)
        return stored

    def _log_lines(self, run_id: str) -> list[str]:
        found: list[str] = []
        cursor = ""
        while True:
            choice = f"fold=false&limit=5000&q=-stream:finding&cursor={cursor}"
            path = f"/api/v1/runs/{run_id}/logs?{choice}"
            with urllib.request.urlopen(self.url + path, timeout=60) as reply:
                page = json.load(reply)
            found += [line["message"] for line in page["lines"]]
            cursor = page["next_cursor"]
            if not cursor:
                return found
