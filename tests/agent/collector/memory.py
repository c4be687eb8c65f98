"""Follows the memory of a real collector through many attempts of a run, hours in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rankscope.wire import schema, zstd
from tests.agent.collector import processes
from tests.agent.collector.long_ranks import PER_STEP
from tests.agent.collector.processes import wait_for
from tests.agent.collector.receiver import Receiver

LONG_RANKS = Path(__file__).parent / "long_ranks.py"
ROOT = Path(__file__).parents[3]


class Counter(Receiver):
    """A server that counts and keeps nothing but the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {"collectives": 0, "steps": 0, "lines": 0, "ended": 0}
        self.lost: dict[tuple[int, int, str, str], int] = {}
        self._seen: dict[str, int] = {}

    def take(self, body: bytes) -> None:
        raw = zstd.unpack(body, 1 << 30)
        batch = schema.decode_batch(raw)
        if self._seen.get(batch.producer, 0) >= batch.sequence:
            return
        self._seen[batch.producer] = batch.sequence
        for chunk in batch.chunks:
            if chunk.kind in self.counts:
                self.counts[chunk.kind] += chunk.count
        for record in map(schema.decode_record, batch.records):
            self.counts["lines"] += isinstance(record, schema.LogLine)
            self.counts["ended"] += isinstance(record, schema.RankEnded)
            if isinstance(record, schema.Loss):
                key = (record.attempt, record.rank, record.source, record.reason)
                self.lost[key] = record.count


@dataclass
class Memory:
    """What came of it."""

    simulated_hours: float = 0.0
    written: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    rss_bytes: list[int] = field(default_factory=list)  # after each attempt
    open_files: list[int] = field(default_factory=list)

    @property
    def growth_bytes(self) -> int:
        """From the second attempt, when everything has been used once, to the last."""
        return self.rss_bytes[-1] - self.rss_bytes[1]


def follow(
    run: Path, attempts: int, steps: int, ranks: int = 2, steps_per_second: float = 200.0
) -> Memory:
    """Run so many attempts of so many steps, one after the other."""
    receiver = Counter()
    run.mkdir(parents=True)
    launcher = run / "node" / "launcher" / f"{os.getpid()}.{start_ticks()}"
    launcher.mkdir(parents=True)  # while we live the collector waits for the next attempt
    collector = processes.start_collector(run, server=receiver.url)
    memory = Memory(simulated_hours=attempts * steps / 3600)
    try:
        for attempt in range(attempts):
            words = [str(run), str(attempt), str(ranks), str(steps), str(steps_per_second)]
            subprocess.run(
                [sys.executable, str(LONG_RANKS), *words], check=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            wait_for(lambda: receiver.counts["ended"] == (attempt + 1) * ranks, 120)  # noqa: B023
            process = psutil.Process(collector.pid)
            memory.rss_bytes.append(int(process.memory_info().rss))
            memory.open_files.append(process.num_fds())
    finally:
        processes.stop(collector)
        receiver.close()
    steps_written = attempts * steps * ranks
    memory.written = {
        "collectives": steps_written * PER_STEP, "steps": steps_written, "lines": steps_written
    }  # fmt: skip
    memory.stored = {name: receiver.counts[name] for name in memory.written}
    memory.lost = sum(receiver.lost.values())
    return memory


def start_ticks() -> int:
    from rankscope.process.family import process_start_ticks

    return process_start_ticks(os.getpid())
