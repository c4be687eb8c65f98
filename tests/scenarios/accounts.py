"""A real job that is killed and goes on, and two accounts of its time: its own, and the ledger's.

The job's own: when torchrun began and ended, as the kernel says, and when each step of each rank
began and ended, as the trainer says (`--step-times`). Nothing of Rankscope is read for it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from rankscope.node.offline import OfflineRun
from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.goodput.detector import ledger_of
from rankscope_server.diagnose.goodput.ledger import Ledger
from tests.scenarios.elastic import WAIT_SECONDS, ElasticRun, kill_one_after_the_other

RUN_ID = "killed"
# A sleep needs no core: the steps of all ranks are as long as on a machine of their own.
LAYER_SECONDS = "0.005"
MAX_SUM_ERROR = 0.005  # of the wall time
MAX_ETTR_ERROR = 0.01


@dataclass(frozen=True)
class Truth:
    """Seconds of all ranks together, by the job's own account."""

    wall: float
    kept: float  # in steps that count: data, computing, waiting for each other
    first: float  # by how much the first step of each start is longer than the others
    lost: float  # in steps that were trained again, with their checkpoints
    checkpoint: float
    lost_steps: int

    @property
    def ettr(self) -> float:
        """Return the share of the wall time in steps that are kept."""
        return (self.kept - self.first) / self.wall

    @property
    def outside(self) -> float:
        """Return the seconds in which no step was trained and no checkpoint written."""
        return self.wall - self.kept + self.first - self.lost - self.checkpoint


@dataclass(frozen=True)
class Accounts:
    """Both accounts of one job."""

    truth: Truth
    book: Ledger
    kills: list[int]  # the ranks
    attempts: int

    @property
    def sum_error(self) -> float:
        """Return by what share of the true wall time the parts miss it."""
        return sum(self.book.parts.values()) / self.truth.wall - 1

    @property
    def ettr_error(self) -> float:
        return self.book.ettr - self.truth.ettr


def killed_job(
    folder: Path, *, kills: int, ranks: int = 2, steps_between: int = 40, seed: int = 1
) -> Accounts:
    """Run the job under `rankscope run`, kill a rank now and then, and draw up both accounts."""
    times = folder / "times.jsonl"
    recorded = folder / "recorded"
    run = ElasticRun(
        folder, "--steps", str(steps_between * (kills + 1)), "--layer-seconds", LAYER_SECONDS,
        "--step-times", str(times), checkpoint_every=2 * steps_between // 3,
        under=[sys.executable, "-m", "rankscope", "run", "--run-id", RUN_ID, "--dir",
               str(recorded), "--"],
    )  # fmt: skip
    try:
        launched = run.start("--standalone", "--nproc-per-node", str(ranks), "--max-restarts",
                             str(kills), RANKSCOPE_SERVER="")  # fmt: skip
        torchrun = _torchrun_of(launched.pid)
        began = _began(torchrun.pid)
        victims = kill_one_after_the_other(run, torchrun, kills, steps_between, seed)
        torchrun.wait(WAIT_SECONDS)
        ended = time.time()
        assert run.finish() == [0], run.output()
    finally:
        run.close()
    truth = truth_of(times, (ended - began) * ranks)
    return Accounts(truth, book_of(recorded / RUN_ID), victims, len(run.attempts()))


def truth_of(times: Path, wall_seconds: float) -> Truth:
    """Return the job's own account; steps that a later start trained again are lost."""
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    last: dict[tuple[int, int], int] = {}  # rank and step -> the start that trained it for good
    for line in lines:
        key = (line["rank"], line["step"])
        last[key] = max(last.get(key, 0), line["restarts"])
    kept = lost = saving = 0.0
    lost_steps: dict[int, int] = defaultdict(int)
    durations: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in lines:
        trained = (line["trained_ns"] - line["began_ns"]) / 1e9
        after = (line["ended_ns"] - line["trained_ns"]) / 1e9
        durations[line["rank"], line["restarts"]].append(trained)
        if last[line["rank"], line["step"]] == line["restarts"]:
            kept, saving = kept + trained, saving + after
        else:
            lost += trained + after
            lost_steps[line["rank"]] += 1
    first = sum(max(0.0, one[0] - statistics.mean(one[1:])) for one in durations.values())
    return Truth(wall_seconds, kept, first, lost, saving, max(lost_steps.values(), default=0))


def book_of(directory: Path) -> Ledger:
    """Return the ledger from what the agents wrote."""
    state, found = RunState(RUN_ID), OfflineRun([directory], RUN_ID)
    for batch in found.batches():
        for record in batch.records:
            state.apply_record(schema.decode_record(bytes(record)))
        for chunk in batch.chunks:
            state.apply_chunk(chunk, decode_chunk(chunk.data))
    *past, newest = [state._attempts[number].window(found.now_ns)
                     for number in sorted(state._attempts)]  # fmt: skip
    window = state._attempts[newest.attempt].window(found.now_ns, past)
    book = ledger_of(window)
    assert book is not None
    return book


def _began(pid: int) -> float:
    """Return when a process began. psutil says so by whole seconds of the boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _torchrun_of(pid: int) -> psutil.Process:
    """Return torchrun, a child of `rankscope run`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            try:
                # not a fork of `rankscope run` on its way to another program: its line holds the
                # whole command too
                if child.cmdline()[1:3] == ["-m", "torch.distributed.run"]:
                    return child
            except psutil.Error:
                continue
        time.sleep(0.02)
    raise AssertionError("torchrun did not start")
