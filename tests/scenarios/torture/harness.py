"""Kills real ranks in a chosen way and compares what the collector delivers with the truth.

Each case is one attempt of the same run: two ranks on gloo that train; the victim, its step and
the place within the step are drawn from the seed. One collector follows them all and sends to a
receiver, which stands for the server.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.node.ranks import launchers
from rankscope.wire import schema
from tests import capabilities, fork_server
from tests.agent import recorded
from tests.agent.collector.processes import is_alive
from tests.agent.collector.receiver import Receiver
from tests.scenarios.torture.ways import Way

RANK = Path(__file__).parent / "rank.py"
WORLD = 2
PER_STEP = 3
PATIENCE_SECONDS = 90.0
_MEMORY_BYTES = 900 << 20
# what starts the victim where its parent is to be killed: it waits, as a launcher does
_PARENT = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@dataclass(frozen=True)
class Case:
    """One death. `attempt` tells its records from those of the others."""

    way: Way
    seed: int
    attempt: int

    @property
    def drawn(self) -> tuple[int, int, int, int]:
        """Victim, step, place within the step, exit code."""
        dice = random.Random(f"{self.way.name} {self.seed}")
        return (
            dice.randrange(WORLD),
            dice.randint(2, 30),
            dice.randrange(PER_STEP),
            dice.randint(2, 99),
        )

    @property
    def word(self) -> str:
        return f"{self.way.name}-{self.seed}"


@dataclass
class Torture:
    """The place of all cases: a run directory, a receiver, and the collector that ranks start."""

    directory: Path
    receiver: Receiver = field(default_factory=Receiver)

    def __post_init__(self) -> None:
        self._run = self.directory / "test"
        # as a launcher does: the collector stays between the cases
        self._own = launchers.own_directory(self._run)
        self._own.mkdir(parents=True)

    def close(self) -> None:
        """Let the collector end, and wait for it."""
        (self._own / launchers.FINISHED).touch()
        pid_file = self._run / "node" / "pid"
        deadline = time.monotonic() + 20
        while pid_file.exists() and is_alive(int(pid_file.read_text())):
            if time.monotonic() > deadline:
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            time.sleep(0.05)
        self.receiver.close()

    def run(self, case: Case) -> list[str]:
        """Let one case happen; return what its record got wrong."""
        store = self.directory / f"store-{case.attempt}"
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(memory_group(case)) if _wants_group(case) else None
            for rank in range(WORLD):
                ranks.append(self._start(case, rank, store, group))
            reaper = threading.Thread(target=_reap, args=(ranks,))
            reaper.start()
            try:
                problems = self._watch(case)
            finally:
                self._end(case, ranks)
                reaper.join()
        return problems or Check(self.receiver, case).problems()

    def _start(
        self, case: Case, rank: int, store: Path, group: Path | None
    ) -> subprocess.Popen[bytes]:
        victim, step, place, code = case.drawn
        words = [case.way.name, victim, step, place, code, case.word]
        # a victim whose parent or memory matters is this process's own
        is_own = rank == victim and (case.way.name == "parent-killed" or group is not None)
        python = [sys.executable] if is_own else fork_server.python()
        command = [*python, str(RANK), *map(str, words)]
        if rank == victim and case.way.name == "parent-killed":
            command = [sys.executable, "-S", "-c", _PARENT, *command]
        if rank == victim and group is not None:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]
        environment = recorded.environment(
            self.directory, RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(WORLD), TORCHELASTIC_RESTART_COUNT=str(case.attempt),
            TORTURE_STORE=str(store), RANKSCOPE_SERVER=self.receiver.url,
            RANKSCOPE_COLLECTOR="1", RANKSCOPE_HANG_STACK_SECONDS="1.0",
            RANKSCOPE_FLUSH_SECONDS="0.5",
        )  # fmt: skip
        with (self.directory / f"{case.attempt}.{rank}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _watch(self, case: Case) -> list[str]:
        """Wait for both ends; kill the victim that is stuck as soon as its stacks are there."""
        check = Check(self.receiver, case)
        deadline = time.monotonic() + PATIENCE_SECONDS
        killed = False
        while len(check.ended()) < WORLD:
            if time.monotonic() > deadline:
                return [f"{case.word}: {len(check.ended())} of {WORLD} ends were delivered"]
            if case.way.stacks and not killed and check.has_stacks():
                killed = True
                os.kill(self._victim_pid(case), signal.SIGKILL)
            time.sleep(0.1)
        return []

    def _victim_pid(self, case: Case) -> int:
        (directory,) = (self._run / str(case.attempt)).glob(f"{case.drawn[0]}.*")
        return int(directory.name.split(".")[1])

    def _end(self, case: Case, ranks: list[subprocess.Popen[bytes]]) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        with contextlib.suppress(OSError, ValueError):  # a victim that outlived its parent
            os.kill(self._victim_pid(case), signal.SIGKILL)


class Check:
    """The records of one case against what happened."""

    def __init__(self, receiver: Receiver, case: Case) -> None:
        self._receiver = receiver
        self._case = case

    def of(self, kind: type[schema.Record], rank: int | None = None) -> list[schema.Record]:
        """Return the records of this case, in order of time."""
        found = [
            record
            for record in self._receiver.records(kind)
            if record.attempt == self._case.attempt and rank in (None, record.rank)
        ]
        return sorted(found, key=lambda record: record.time_ns)

    def ended(self) -> list[schema.Record]:
        return self.of(schema.RankEnded)

    def has_stacks(self) -> bool:
        stacks = self.of(schema.Stacks, self._case.drawn[0])
        return any(self._case.way.stacks in record.text for record in stacks)  # type: ignore[attr-defined]

    def problems(self) -> list[str]:
        """Return one sentence for each fact that is wrong."""
        victim, step, place, code = self._case.drawn
        expected = {
            **self._expected_end(step, code),
            **self._expected_last(victim, (step - 1) * PER_STEP + place),
        }
        seen = {**self._seen_end(victim), **self._seen_last(victim)}
        wrong = [
            f"{self._case.word}: {name} is {seen.get(name)!r}, not {value!r}"
            for name, value in expected.items()
            if seen.get(name) != value
        ]
        return wrong + self._survivor_problems(victim)

    def _expected_end(self, step: int, code: int) -> dict[str, object]:
        way = self._case.way
        return {
            "reason": way.reason,
            "signal": way.signal,
            "exit_code": code if way.exit_code == "code" else way.exit_code,
            "last_step": step - 1 if way.is_orderly else step,
            "detail": True,
            "errors": {
                *([(way.error, way.where, step)] if way.error else []),
                *([(way.said, "fatal_signal", 0)] if way.said else []),
            },
        }

    def _seen_end(self, victim: int) -> dict[str, object]:
        ends = self.of(schema.RankEnded, victim)
        if len(ends) != 1:
            return {"reason": f"{len(ends)} ends"}
        (end,) = ends
        assert isinstance(end, schema.RankEnded)
        errors = self.of(schema.ErrorRaised, victim)
        return {
            "reason": end.reason,
            "signal": end.signal,
            "exit_code": end.exit_code,
            "last_step": end.last_step,
            "detail": self._case.way.detail in end.detail or end.detail,
            "errors": {
                (e.type.replace("-", " "), e.where, e.step)
                for e in errors
                if isinstance(e, schema.ErrorRaised)
            },
        }

    def _expected_last(self, victim: int, sequence: int) -> dict[str, object]:
        return {
            "state": (False, sequence, sequence, "all_reduce" if sequence else ""),
            "last collective": (sequence, schema.ENDED),
            "last line": f"rank {victim} says goodbye: {self._case.word}",
            "cpu and memory are known": True,
        }

    def _seen_last(self, victim: int) -> dict[str, object]:
        state = self.of(schema.RankState, victim)[-1]
        assert isinstance(state, schema.RankState)
        group = state.groups[0] if state.groups else None
        lines = [
            line.message for line in self.of(schema.LogLine, victim)
            if isinstance(line, schema.LogLine) and line.logger == "torture"
        ]  # fmt: skip
        return {
            "state": group and (state.alive, group.issued, group.ended, group.operation),
            "last collective": self._last_collective(victim),
            "last line": lines[-1] if lines else "",
            "cpu and memory are known": state.cpu_seconds > 0 and state.rss_bytes > 0,
        }

    def _last_collective(self, victim: int) -> tuple[int, int]:
        rows = self._receiver.rows_of_attempt(
            "collectives", self._case.attempt, "sequence", "state"
        )
        return max((sequence, state) for rank, sequence, state in rows if rank == victim)

    def _survivor_problems(self, victim: int) -> list[str]:
        """The others must be told as victims: an error of a collective, after the first death."""
        wrong = []
        (first,) = self.of(schema.RankEnded, victim) or [None]
        for rank in set(range(WORLD)) - {victim}:
            (end,) = self.of(schema.RankEnded, rank)
            assert isinstance(end, schema.RankEnded)
            errors = [
                e for e in self.of(schema.ErrorRaised, rank) if isinstance(e, schema.ErrorRaised)
            ]
            if end.reason != "exception" or not any(e.where == "collective" for e in errors):
                wrong.append(f"{self._case.word}: the other rank ended by {end.reason}: {errors}")
            if first is None or end.time_ns < first.time_ns:
                wrong.append(f"{self._case.word}: the other rank is said to have died first")
        return wrong


def _reap(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Reap in the way of torchrun: a look each tenth of a second."""
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)


def _wants_group(case: Case) -> bool:
    return case.way.name == "oom-killer"


@contextlib.contextmanager
def memory_group(case: Case) -> Iterator[Path]:
    """Make a cgroup with little memory for the time of one case."""
    root = capabilities.memory_cgroup()
    assert root is not None
    group = root / f"rankscope-torture-{os.getpid()}-{case.attempt}"
    group.mkdir()
    try:
        capabilities.limit_memory(group, _MEMORY_BYTES)
        yield group
    finally:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
