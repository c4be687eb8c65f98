"""Kills the collector again and again, takes the server away, and compares what is stored.

Real processes all: ranks that write real rings and journals, collectors, the server. Used by
`benchmarks/kill_collector.py` in full and by the tests in a short form.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.files.start_collector import ensure_collector
from tests.agent.collector import processes
from tests.agent.collector.processes import wait_for
from tests.agent.collector.real_server import RealServer, Stored

RUN = "kill-test"
STEADY_RANK = Path(__file__).parent / "steady_rank.py"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Plan:
    """How hard it is made."""

    ranks: int = 4
    collectives_per_second: float = 100.0  # of each rank
    kills: int = 60
    kill_every_seconds: float = 1.0
    outage_seconds: float = 300.0
    kills_in_outage: int = 5
    spool_bytes: int = 256 << 20
    seed: int = 1


@dataclass
class Result:
    """What was written, what is stored, what is missing, what is there twice."""

    kills: int = 0
    outage_seconds: float = 0.0
    seconds: float = 0.0
    written: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    not_written: dict[str, int] = field(default_factory=dict)  # stored, but by no rank
    losses: dict[str, int] = field(default_factory=dict)  # as the collector counted them
    batches: int = 0
    batches_missing: int = 0
    producers: int = 0
    ranks_ended: int = 0
    most_spooled_bytes: int = 0

    @property
    def is_exact(self) -> bool:
        """Everything that was written is stored, once, and nothing else."""
        return not any(
            count
            for counts in (self.missing, self.twice, self.not_written, self.losses)
            for count in counts.values()
        )


class Killing:
    """One run of a plan, in `folder`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.server = RealServer(folder / "server")
        self.run = folder / RUN
        self.result = Result()
        self._stop = folder / "stop"
        self._draw = random.Random(plan.seed)
        self._environment = processes.environment(
            server=self.server.url, spool_bytes=plan.spool_bytes, sample_seconds=1.0
        )

    def carry_out(self) -> Result:
        """Do all of it and compare."""
        begun = time.monotonic()
        self.run.mkdir(parents=True)
        self.server.start()
        ranks = [self._start_rank(rank) for rank in range(self.plan.ranks)]
        try:
            wait_for(lambda: len(list(self.run.glob("0/*/steps.ring"))) == len(ranks))
            self._kill_often(self.plan.kills, self.plan.kill_every_seconds)
            self._take_server_away()
            self._stop.touch()
            written = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
            self._until_all_is_told(len(ranks))
            self._compare(written, self.server.stored(RUN))
        finally:
            for rank in ranks:
                processes.stop(rank)
            if self._is_up():
                self._kill_collector()
            self.server.kill()
        self.result.seconds = time.monotonic() - begun
        return self.result

    def _start_rank(self, rank: int) -> subprocess.Popen[str]:
        rate = str(self.plan.collectives_per_second)
        return subprocess.Popen(
            [sys.executable, str(STEADY_RANK), str(self.run), str(rank), rate, str(self._stop)],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def _kill_often(self, kills: int, every_seconds: float) -> None:
        """Kill `kills` collectors, each so long after it was started, a little more or less."""
        for _ in range(kills):
            wait_for(self._ensure)
            self._wait(every_seconds * self._draw.uniform(0.8, 1.2))
            self._kill_collector()
        wait_for(self._ensure)

    def _take_server_away(self) -> None:
        self.server.kill()
        begun = time.monotonic()
        lives = self.plan.kills_in_outage + 1
        for life in range(lives):
            self._wait(self.plan.outage_seconds / lives)
            if life < self.plan.kills_in_outage:
                self._kill_collector()
                wait_for(self._ensure)
        before = self.server.num_batches(RUN)
        self.server.start()
        self.result.outage_seconds = time.monotonic() - begun
        # the ends of the ranks must not be among what a full spool drops
        wait_for(lambda: self.server.num_batches(RUN) > before + 1, 60)

    def _ensure(self) -> bool:
        return ensure_collector(self.run, self._environment)

    def _kill_collector(self) -> None:
        """Kill the collector as soon as it has said who it is."""
        wait_for(self._is_up)
        pid = processes.collector_pid(self.run)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes.is_alive(pid))
        self.result.kills += 1

    def _is_up(self) -> bool:
        try:
            return processes.is_alive(processes.collector_pid(self.run))
        except (OSError, ValueError):
            return False

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            size = sum(path.stat().st_size for path in self._spooled())
            self.result.most_spooled_bytes = max(self.result.most_spooled_bytes, size)
            time.sleep(min(left, 0.5))

    def _spooled(self) -> list[Path]:
        spool = self.run / "node" / "spool"
        return [path for path in spool.glob("*.batch") if path.exists()]

    def _until_all_is_told(self, num_ranks: int) -> None:
        wait_for(lambda: self.server.num_ended(RUN) == num_ranks, 60)
        wait_for(lambda: not self._spooled(), 60)

    def _compare(self, written: list[dict[str, object]], stored: Stored) -> None:
        collectives, steps, lines = set(), set(), set()
        for rank, wrote in enumerate(written):
            sequences: dict[str, int] = wrote["sequences"]  # type: ignore[assignment]
            for group, last in sequences.items():
                collectives |= {(rank, group, number) for number in range(1, last + 1)}
            steps |= {(rank, step) for step in range(1, int(str(wrote["steps"])) + 1)}
            lines |= {f"line-{rank}-{number}-end" for number in range(int(str(wrote["lines"])))}
        found = stored.lines.copy()
        for line in stored.lines:
            if not line.startswith("line-"):
                del found[line]
        pairs = {
            "collectives": (collectives, stored.collectives),
            "steps": (steps, stored.steps),
            "log lines": (lines, found),
        }
        result = self.result
        for name, (wanted, have) in pairs.items():
            result.written[name] = len(wanted)
            result.missing[name] = len(wanted - set(have))  # type: ignore[operator]
            result.not_written[name] = len(set(have) - wanted)  # type: ignore[operator]
            result.twice[name] = sum(have.values()) - len(have)
        result.twice["collectives in sums"] = stored.in_sums - sum(stored.collectives.values())
        result.losses = {f"{s}: {r}": count for (s, r), count in stored.losses.items()}
        result.producers = len(stored.of_events)
        result.batches = sum(received for _, received in stored.producers.values())
        result.batches_missing = sum(last - got for last, got in stored.producers.values())
        result.ranks_ended = len(stored.ended)
