"""How long ranks really waited: by a preloaded library that knows nothing of the agent.

`waits.c` writes down each sleep of the main thread on a condition variable of C++. Here those
sleeps are put beside what the agent recorded of the same steps. Time in which the thread could run
and got no processor is neither work nor waiting for a peer: a record may count it as either.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rankscope.wire import schema
from tests.agent import recorded

HERE = Path(__file__).parent
WARM_UP = 3  # steps in which DDP orders its buckets anew, and memory is touched for the first time
WITHIN = 0.02  # of the step
_BLOCKED = tuple(f"{phase}_blocked_ns" for phase in ("forward", "backward", "optimizer", "other"))


@dataclass(frozen=True)
class Waits:
    """The steps of one program on one rank, in ns: one entry a step."""

    program: str
    rank: int
    begun: NDArray[np.int64]  # CLOCK_MONOTONIC
    duration: NDArray[np.int64]
    truth: NDArray[np.int64]
    recorded: NDArray[np.int64]
    crowded: NDArray[np.int64]  # without a processor, though it could run

    @property
    def errors(self) -> NDArray[np.float64]:
        """Return by what share of the step the record differs from the truth, beside crowding."""
        difference = self.recorded - self.truth
        beyond = np.maximum(np.abs(difference) - self.crowded, 0)
        return np.sign(difference) * beyond / self.duration

    def only(self, steps: NDArray[np.int64], program: str) -> Waits:
        """Return some of the steps, by their indices, as those of a program."""
        columns = (self.begun, self.duration, self.truth, self.recorded, self.crowded)
        return Waits(program, self.rank, *(column[steps] for column in columns))

    def share_within(self, limit: float) -> float:
        """Return the share of steps whose record differs by no more than `limit` of the step."""
        return float((np.abs(self.errors) <= limit).mean())

    def __str__(self) -> str:
        middle, truth, told, crowded = (
            float(np.median(one)) / 1e6
            for one in (self.duration, self.truth, self.recorded, self.crowded)
        )
        return (
            f"{self.program:<24}rank {self.rank}  step {middle:6.1f} ms  waits {truth:6.1f}  "
            f"recorded {told:6.1f}  crowded {crowded:4.1f}  "
            f"right in {100 * self.share_within(WITHIN):5.1f} %  "
            f"error {100 * self.errors.min():+.1f} to {100 * self.errors.max():+.1f} %"
        )


def library(folder: Path) -> Path:
    """Compile what is preloaded."""
    path = folder / "waits.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(path), str(HERE / "waits.c"), "-ldl"]
    subprocess.run(command, check=True)
    return path


def run(
    folder: Path, preloaded: Path, names: Sequence[str], *, source: str, ranks: int, steps: int,
    slow_ms: float,
) -> list[Waits]:  # fmt: skip
    """Run programs on real ranks and return what each rank waited in each."""
    told = folder / "waits"
    told.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), str(HERE / "programs.py"), str(told), str(steps), str(slow_ms), *names],
        env=recorded.environment(
            folder, RANKSCOPE_COLLECTIVES=source, RANKSCOPE_OVERHEAD_PERCENT="100",
            LD_PRELOAD=str(preloaded), WAITS=str(told),
        ),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [waits for rank in recorded.read(folder) for waits in _of_programs(told, rank)]


def of_steps(told: Path, rank: recorded.Recorded) -> Waits:
    """Return all steps of one rank, whatever program it ran; `told` is the preloaded one's folder.

    Raises FileNotFoundError where it was not preloaded into that rank.
    """
    pid = rank.of(schema.RankRegistered)[0].pid
    slept = np.fromfile(told / str(pid), dtype=np.uint64).astype(np.int64).reshape(-1, 3)
    begun, ended = (rank.steps[name].astype(np.int64) for name in ("started_ns", "ended_ns"))
    blocked = sum(rank.steps[name].astype(np.int64) for name in _BLOCKED)
    truth = np.array([
        np.clip(np.minimum(slept[:, 1], to) - np.maximum(slept[:, 0], at), 0, None).sum()
        for at, to in zip(begun, ended, strict=True)
    ])  # fmt: skip
    # by the sleeps that ended next to the step's two ends
    total = np.r_[0, slept[:, 2]]
    places = (np.searchsorted(slept[:, 1], begun, "right"), np.searchsorted(slept[:, 1], ended))
    last = np.minimum(places[1] + 1, len(total) - 1)
    crowded = total[last] - total[places[0]]
    return Waits("", rank.rank, begun, ended - begun, truth, blocked, crowded)


def _of_programs(told: Path, rank: recorded.Recorded) -> Iterator[Waits]:
    steps = of_steps(told, rank)
    pid = rank.of(schema.RankRegistered)[0].pid
    for line in (told / f"programs-{pid}.txt").read_text().splitlines():
        name, first, last = line.split()
        ended = steps.begun + steps.duration
        mine = np.flatnonzero((steps.begun >= int(first)) & (ended <= int(last)))[WARM_UP:]
        yield steps.only(mine, name)
