"""Are mistakes that waste most of a run found, with the right cost, and clean runs left alone?

    python benchmarks/mistakes_cost.py [--seeds 10] [--clean 20] [--mistakes NAME,...] [--out FILE]

Each run is real ranks under `rankscope run`. The truth is for how long the programs themselves
say that they waited, by their own clocks, as a share of their steps:

    model_parallel, two_stages   the mean of all ranks; two_stages is a script that says nothing of
                                 its stages
    parameter_server             the worker that waits least in each step

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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ranks import CLEAN, ROOT, STEP_TIMES, Server

RESULTS = ROOT / "benchmarks" / "results" / "mistakes_cost.jsonl"
MAX_POINTS = 5.0
KINDS = ("no_pipelining", "server_bottleneck")
SCRIPT = str(ROOT / "tests" / "scenarios" / "mistakes" / "two_stages.py")
FIRST = 10  # steps that do not count: start-up and warm-up


@dataclass(frozen=True)
class Mistake:
    """A way to make one."""

    name: str
    kind: str
    ranks: int
    program: tuple[str, ...]


def _trainer(*arguments: str) -> tuple[str, ...]:
    return ("-m", "rankscope_trainer", "--steps", "60", *arguments)


_LAYERS = ("--layer-seconds", "0.006", "--microbatches", "1")
MISTAKES = (
    Mistake(
        "model_parallel", "no_pipelining", 2,
        _trainer("--strategy", "model_parallel", *_LAYERS),
    ),
    Mistake("two_stages", "no_pipelining", 2, (SCRIPT,)),
    Mistake(
        "parameter_server", "server_bottleneck", 4,
        _trainer("--strategy", "parameter_server", "--width", "256", "--context", "16",
                 "--batch-size", "1", *_LAYERS),
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


def run(server: Server, run_id: str, ranks: int, program: Sequence[str], folder: Path) -> None:
    """Run a program under `rankscope run` to its end. Raises CalledProcessError."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    folder.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", run_id,
             "--dir", str(folder / "run"), "--", sys.executable, "-m", "torch.distributed.run",
             "--standalone", "--nproc-per-node", str(ranks), *program,
             "--step-times", str(folder / STEP_TIMES)],
            env=kept | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True, timeout=300,
        )  # fmt: skip


def waited_share(folder: Path, kind: str) -> float:
    """Return which share of its steps a run waited, after the first ones."""
    rows = list(map(json.loads, (folder / STEP_TIMES).read_text().splitlines()))
    ended_ns = sorted(row["ended_ns"] for row in rows if row["rank"] == 0)[FIRST:]
    step_seconds = statistics.median(b - a for a, b in itertools.pairwise(ended_ns)) / 1e9
    waited: dict[int, list[float]] = {}
    for row in rows:
        if row["step"] > FIRST and "waited_seconds" in row:  # a server has none
            waited.setdefault(row["step"], []).append(row["waited_seconds"])
    of_ranks = statistics.mean if kind == "no_pipelining" else min
    return statistics.median(map(of_ranks, waited.values())) / step_seconds


def made(server: Server, mistake: Mistake, seed: int, folder: Path) -> Made:
    """Make a mistake once, and measure what it costs."""
    run_id = f"{mistake.name}-{seed}"
    seeded = ("--seed", str(seed)) if mistake.program[0] == "-m" else ()
    run(server, run_id, mistake.ranks, (*mistake.program, *seeded), folder / run_id)
    found = outcome(server, run_id, mistake.name, mistake.name, seed, (mistake.kind,))
    return dataclasses.replace(found, truth=waited_share(folder / run_id, mistake.kind))


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
