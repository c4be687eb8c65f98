"""Are mistakes that waste most of a run found, with the right cost, and clean runs left alone?

    python benchmarks/mistakes_cost.py [--seeds 10] [--clean 20] [--mistakes NAME,...] [--out FILE]

Each run is real ranks under `rankscope run`. The truth is by the programs' own clocks; all but two
are shares of the time after the first steps:

    model_parallel, two_stages   what the mean rank waited in a step; two_stages is a script that
                                 says nothing of its stages
    parameter_server             what the worker waited in a step that waited least
    slow_checkpoint              what the slowest rank took for saves
    rare_checkpoint              steps that were made again, and saves, less the same of a second
                                 run that saves as often as was advised. Both are killed three times
                                 in the same steps: a sixth, half and five sixths of the way to a
                                 save, in an order that the seed draws
    uneven_stages                what a second run takes less that has even stages
    few_microbatches             what a second run takes less that cuts the batch as was advised;
                                 layers of both sleep, so that stages share no processor

A clean run is of a strategy without the mistake; it is wrong if either kind is said of it. Writes
one JSON object per run to --out as they end; runs that are there already are not made again, so the
same command continues where it was stopped. Exit code 1 if a mistake is not found, is called
healthy, or its cost is off by more than five points of a hundred, or a clean run is advised.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ranks import CLEAN, ROOT, STEP_TIMES, Server

RESULTS = ROOT / "benchmarks" / "results" / "mistakes_cost.jsonl"
MAX_POINTS = 5.0
KINDS = ("no_pipelining", "server_bottleneck")
SCRIPT = str(ROOT / "tests" / "scenarios" / "mistakes" / "two_stages.py")
FIRST = 10  # steps that do not count: start-up and warm-up
Finding = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A way to make one."""

    name: str
    kind: str
    ranks: int
    program: tuple[str, ...]
    more: Callable[[random.Random], tuple[str, ...]] = lambda _chance: ()  # drawn by the seed
    share: Callable[[Path], float] | None = None  # lost by it, of the time of a run
    # What is added to a second run to mend it; None where one run is enough.
    mended: Callable[[Finding, Path], tuple[str, ...]] | None = None
    saves: bool = False
    launcher: tuple[str, ...] = ()


# --- what the programs' clocks say ---------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of a run, as its ranks say."""
    return [json.loads(line) for line in (folder / STEP_TIMES).read_text().splitlines()]


def step_seconds(folder: Path) -> float:
    """Return how long a step takes, after the first ones."""
    ended_ns = sorted(row["ended_ns"] for row in rows_of(folder) if row["rank"] == 0)[FIRST:]
    return float(statistics.median(b - a for a, b in itertools.pairwise(ended_ns))) / 1e9


def whole_seconds(folder: Path) -> float:
    """Return how long all steps took after the first ones, with restarts and steps made again."""
    rows = rows_of(folder)
    begun_ns = max(row["ended_ns"] for row in rows if row["step"] == FIRST and not row["restarts"])
    return float(max(row["ended_ns"] for row in rows) - begun_ns) / 1e9


def _waiting(folder: Path, of_ranks: Callable[[list[float]], float]) -> float:
    waited: dict[int, list[float]] = {}
    for row in rows_of(folder):
        if row["step"] > FIRST and "waited_seconds" in row:  # a server has none
            waited.setdefault(row["step"], []).append(row["waited_seconds"])
    return statistics.median(map(of_ranks, waited.values())) / step_seconds(folder)


def mean_waiting(folder: Path) -> float:
    """Return which share of a step the mean rank waits."""
    return _waiting(folder, statistics.mean)


def least_waiting(folder: Path) -> float:
    """Return which share of a step the rank waits that waits least."""
    return _waiting(folder, min)


def saving(folder: Path) -> float:
    """Return which share of the time the slowest rank takes after the updates of its steps."""
    took: dict[tuple[int, int], int] = {}
    for row in rows_of(folder):
        if row["step"] > FIRST:
            key = (row["restarts"], row["step"])
            took[key] = max(took.get(key, 0), row["ended_ns"] - row["trained_ns"])
    return sum(took.values()) / 1e9 / whole_seconds(folder)


def lost_and_saving(folder: Path) -> float:
    """Return which share of the time went into saves, and into steps that were made again."""
    rows, lost_ns = rows_of(folder), 0
    by_attempt = [
        [row for row in rows if row["restarts"] == attempt]
        for attempt in sorted({row["restarts"] for row in rows})
    ]
    for attempt, later in itertools.pairwise(by_attempt):
        first = min(row["step"] for row in later)
        again = [row for row in attempt if row["step"] >= first]
        if again:
            began_ns = min(row["began_ns"] for row in again)
            lost_ns += max(row["ended_ns"] for row in again) - began_ns
    return lost_ns / 1e9 / whole_seconds(folder) + saving(folder)


# --- how mistakes are made, and mended -----------------------------------------------------------


def _trainer(*arguments: str) -> tuple[str, ...]:
    return ("-m", "rankscope_trainer", "--steps", "60", *arguments)


def _uneven(chance: random.Random) -> tuple[str, ...]:
    return ("--fault", f"uneven_stages:rank=all,size={chance.choice((1, 2))}")


def _nothing(_found: Finding, _folder: Path) -> tuple[str, ...]:
    return ()


def _more_microbatches(found: Finding, _folder: Path) -> tuple[str, ...]:
    """Return the flags of the same batch in so many microbatches, each of so much less work."""
    written = re.search(r"into (\d+) microbatches", found["next"])
    assert written
    count = int(written[1])
    size = _FEW[0] * _FEW[1] / count
    seconds = _FEW_SECONDS * _FEW[0] / count
    return ("--microbatches", str(count), "--batch-size", str(max(1, round(size))),
            "--layer-seconds", f"{seconds:.6f}")  # fmt: skip


def _slow_saves(chance: random.Random) -> tuple[str, ...]:
    seconds = chance.choice((0.5, 1, 2))
    return ("--fault", f"slow_checkpoint:rank={chance.randrange(4)},start=1,size={seconds}s")


def _kills(chance: random.Random) -> tuple[str, ...]:
    """Return three ends, which are half the way to a save on average."""
    parts = [1 / 6, 1 / 2, 5 / 6]
    chance.shuffle(parts)
    steps = [round(_RARE * (2 * n + 1 + part)) for n, part in enumerate(parts)]
    return tuple(
        word for n, step in enumerate(steps)
        for word in ("--fault", f"sigkill:rank={chance.randrange(4)},start={step},attempt={n}")
    )  # fmt: skip


def _often(found: Finding, folder: Path) -> tuple[str, ...]:
    """Return the flag that saves after so many steps as take the time that was advised."""
    written = re.search(r"Save every ([\d.,]+) (ms|s|min|h);", found["next"])
    assert written, found["next"]
    unit_seconds = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}[written[2]]
    apart_seconds = float(written[1].replace(",", "")) * unit_seconds
    steps = max(1, round(apart_seconds / step_seconds(folder)))
    return ("--checkpoint-every", str(steps))


_LAYERS = ("--layer-seconds", "0.006", "--microbatches", "1")
# Microbatches, sequences of each, and a layer's forward: long enough that those of the second run
# take 0.2 s, as real ones do. What shorter ones lose, which grows with their number, is not said.
_FEW, _FEW_SECONDS = (2, 18), 0.3
_RARE = 40  # steps from save to save
MISTAKES = (
    Mistake(
        "model_parallel", "no_pipelining", 2,
        _trainer("--strategy", "model_parallel", *_LAYERS), share=mean_waiting,
    ),
    Mistake("two_stages", "no_pipelining", 2, (SCRIPT,), share=mean_waiting),
    Mistake(
        "parameter_server", "server_bottleneck", 4,
        _trainer("--strategy", "parameter_server", "--width", "256", "--context", "16",
                 "--batch-size", "1", *_LAYERS),
        share=least_waiting,
    ),
    Mistake(
        "uneven_stages", "stage_imbalance", 4,
        _trainer("--strategy", "pipeline", "--layers", "8", "--microbatches", "8",
                 "--batch-size", "1", "--layer-seconds", "0.008", "--steps", "40"),
        more=_uneven, mended=_nothing,
    ),
    Mistake(
        "few_microbatches", "pipeline_bubble", 2,
        _trainer("--strategy", "pipeline", "--schedule", "gpipe", "--layers", "2",
                 "--microbatches", str(_FEW[0]), "--batch-size", str(_FEW[1]),
                 "--layer-seconds", str(_FEW_SECONDS), "--steps", "30"),
        mended=_more_microbatches,
    ),
    Mistake(
        "slow_checkpoint", "slow_checkpoint", 4,
        _trainer("--steps", "160", "--checkpoint-every", "20"),
        more=_slow_saves, share=saving, saves=True,
    ),
    Mistake(
        "rare_checkpoint", "checkpoint_interval", 4,
        _trainer("--steps", "280", "--checkpoint-every", str(_RARE)),
        more=_kills, share=lost_and_saving, mended=_often, saves=True,
        launcher=("--max-restarts", "4"),
    ),
)  # fmt: skip
# The clean runs are those of the other strategies; a server with two small workers holds up none.
CLEAN_RUNS = tuple(pair for pair in CLEAN if pair[0] != "model_parallel")


@dataclass
class Made:
    """One run. Shares of 0 to 1."""

    mistake: str  # of a clean run: "none"
    program: str
    seed: int
    kind: str
    answer: str
    state: str
    said: float | None = None
    truth: float | None = None
    others: tuple[str, ...] = ()  # kinds above info that were said as well

    @property
    def judgement(self) -> str:
        """Return "right", or what is wrong."""
        if self.mistake == "none":
            return "right" if self.said is None else f"false alarm: {self.kind}"
        if self.said is None or self.truth is None:
            return "said nothing"
        if self.state == "healthy":
            return "called healthy"
        points = 100 * (self.said - self.truth)
        return "right" if abs(points) <= MAX_POINTS else f"off by {points:+.1f} points"


def run(
    server: Server, run_id: str, ranks: int, program: Sequence[str], folder: Path,
    launcher: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run a program under `rankscope run` to its end. Raises CalledProcessError."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    folder.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", run_id,
             "--dir", str(folder / "run"), "--", sys.executable, "-m", "torch.distributed.run",
             "--standalone", "--nproc-per-node", str(ranks), *launcher, *program,
             "--step-times", str(folder / STEP_TIMES)],
            env=kept | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True, timeout=300,
        )  # fmt: skip


def made(server: Server, mistake: Mistake, seed: int, folder: Path) -> Made:
    """Make a mistake once, and measure what it costs."""
    run_id = f"{mistake.name}-{seed}"
    seeded = ("--seed", str(seed)) if mistake.program[0] == "-m" else ()
    program = (*mistake.program, *seeded)

    def end(name: str, *more: str) -> Path:
        saves = ("--checkpoint-dir", str(folder / name / "saves")) if mistake.saves else ()
        run(server, name, mistake.ranks, (*program, *saves, *more), folder / name,
            mistake.launcher)  # fmt: skip
        return folder / name

    planted = mistake.more(random.Random(f"{mistake.name} {seed}"))
    with_it = end(run_id, *planted)
    found = outcome(server, run_id, mistake.name, mistake.name, seed, (mistake.kind,))
    if mistake.mended is None:
        assert mistake.share
        return dataclasses.replace(found, truth=mistake.share(with_it))
    if found.said is None:
        return found
    kept = planted if mistake.launcher else ()  # what ends its ranks is no part of the mistake
    finding = next(
        one for one in server.get(f"runs/{run_id}/findings")["open"] if one["kind"] == mistake.kind
    )
    without = end(f"{run_id}-mended", *kept, *mistake.mended(finding, with_it))
    if mistake.share:
        return dataclasses.replace(found, truth=mistake.share(with_it) - mistake.share(without))
    truth = 1.0 - whole_seconds(without) / whole_seconds(with_it)
    return dataclasses.replace(found, truth=truth)


def outcome(
    server: Server, run_id: str, mistake: str, program: str, seed: int, kinds: Sequence[str]
) -> Made:
    """Return what is said of a run that is over."""
    findings: list[dict[str, Any]] = server.get(f"runs/{run_id}/findings")["open"]
    answer = server.get(f"runs/{run_id}")["answer"]
    mine = [one for one in findings if one["kind"] in kinds]
    return Made(
        mistake, program, seed, mine[0]["kind"] if mine else "", answer["text"], answer["state"],
        said=mine[0]["cost_throughput_ratio"] if mine else None,
        others=tuple(one["kind"] for one in findings if one["severity"] != "info"),
    )  # fmt: skip


def clean(server: Server, number: int, folder: Path) -> Made:
    """Make a run without either mistake."""
    strategy, ranks = CLEAN_RUNS[number % len(CLEAN_RUNS)]
    run_id = f"clean-{strategy}-{number}"
    run(server, run_id, ranks, _trainer("--strategy", strategy, "--seed", str(number)),
        folder / run_id)  # fmt: skip
    return outcome(server, run_id, "none", strategy, number, KINDS)


def read(path: Path) -> list[Made]:
    """Return the runs of a file; none where there is no such file."""
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [Made(**row | {"others": tuple(row["others"])}) for row in rows]


def summary(runs: Sequence[Made]) -> int:
    """Print each kind of run; return the exit code."""
    is_wrong = False
    for name in dict.fromkeys(one.mistake for one in runs):
        mine = [one for one in runs if one.mistake == name]
        right = sum(one.judgement == "right" for one in mine)
        errors = [
            100 * abs(one.said - one.truth)
            for one in mine
            if one.said is not None and one.truth is not None
        ]
        off = (
            f", {statistics.median(errors):.1f} points off, at most {max(errors):.1f}"
            if errors
            else ""
        )
        print(f"{name:<20}{right}/{len(mine)} right{off}")
        is_wrong |= right < len(mine)
    return 1 if is_wrong else 0


def main() -> int:
    """Make all runs that are not there yet, print as they come, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each mistake")
    parser.add_argument("--clean", type=int, default=20, help="runs without a mistake")
    parser.add_argument("--mistakes", default=",".join(one.name for one in MISTAKES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    there = {(one.mistake, one.seed) for one in read(chosen.out)}
    names = chosen.mistakes.split(",")
    with tempfile.TemporaryDirectory(prefix="rankscope-mistakes-") as scratch:
        folder = Path(scratch)
        server = Server(folder)
        try:
            jobs = [
                (lambda one=one, seed=seed: made(server, one, seed, folder))
                for seed in range(1, chosen.seeds + 1)
                for one in MISTAKES
                if one.name in names and (one.name, seed) not in there
            ]
            jobs += [
                (lambda number=number: clean(server, number, folder))
                for number in range(chosen.clean)
                if ("none", number) not in there
            ]
            for job in jobs:
                one = job()
                print(f"{one.program:<20}seed {one.seed:<4}{one.judgement}", flush=True)
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                with chosen.out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(one)) + "\n")
        finally:
            server.close()
    return summary(read(chosen.out))


if __name__ == "__main__":
    sys.exit(main())
