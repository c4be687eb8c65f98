"""How long the ranks of a pipeline idle, measured, beside (p - 1) / (m + p - 1).

    python benchmarks/bubble.py [--json] [--ranks 2,4] [--microbatches 2,4,8,16]
                                [--schedules gpipe,1f1b,interleaved,zero_bubble,model_parallel]

Runs the reference trainer with p equal stages, whose layers sleep for most of their time
(`layer_seconds`), so that the cores of this machine do not decide. A rank is busy inside the
forwards and backwards of its stages; the rest of a step, from the beginning of one to that of the
next, it idles. Shown is the median over ranks and steps, with the quartiles, and the mean over
ranks of the least disturbed step.

Idle time follows from p ranks and m microbatches, where a backward takes twice a forward:

    gpipe, 1f1b       (p - 1) / (m + p - 1)        1f1b needs m >= p
    interleaved       (p - 1) / (v m + p - 1)      with v stages on each rank, here 2
    model_parallel    (p - 1) / p                  a single microbatch
    zero_bubble       no formula for the order that PyTorch chooses
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("bubble_rank.py")
VIRTUAL_STAGES = {"interleaved": 2, "zero_bubble": 2, "zero_bubble_v": 2}  # else 1
MODEL = "--width 16 --heads 2 --context 16 --batch-size 2 --data-bytes 65536 --device cpu".split()


def expected(schedule: str, ranks: int, microbatches: int) -> float | None:
    """Return the idle share that the mathematics says, where there is a formula."""
    if schedule.startswith("zero_bubble"):
        return None
    waves = VIRTUAL_STAGES.get(schedule, 1) * microbatches
    return (ranks - 1) / (waves + ranks - 1)


def arguments_of(schedule: str, ranks: int, microbatches: int, stage_seconds: float) -> list[str]:
    """Return the trainer's settings for one configuration."""
    stages = VIRTUAL_STAGES.get(schedule, 1)
    settings = [*MODEL, "--layers", str(ranks * stages), "--microbatches", str(microbatches)]
    settings += ["--layer-seconds", str(stage_seconds / stages)]
    if schedule == "model_parallel":
        return [*settings, "--strategy", schedule]
    return [*settings, "--strategy", "pipeline", "--schedule", schedule]


def launcher(ranks: int) -> list[str]:
    """Return what starts so many ranks of the program that follows."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(ranks)]


def measure(ranks: int, runs: list[list[str]]) -> list[Any]:
    """Run one configuration after the other; return busy and whole seconds by rank and step."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher(ranks), str(RANK), folder, json.dumps(runs)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{ranks} ranks failed:\n{done.stdout}{done.stderr}")
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return list(zip(*by_rank, strict=True))


def row_of(schedule: str, ranks: int, microbatches: int, by_rank: Any) -> dict[str, Any]:
    """Return one row of the table."""
    # The first step also makes connections; the last one ends on each rank as its own work does.
    steps = [step for rank in by_rank for step in rank[1:-1]]
    idle = [1 - busy / whole for busy, whole in steps]
    low, median, high = statistics.quantiles(idle, n=4)
    # Other work on the machine only adds idle time, and to some steps more than to others.
    of_steps = [
        statistics.mean(1 - busy / whole for busy, whole in step)
        for step in zip(*(rank[1:-1] for rank in by_rank), strict=True)
    ]
    return {
        "schedule": schedule,
        "ranks": ranks,
        "microbatches": microbatches,
        "expected_ratio": expected(schedule, ranks, microbatches),
        "idle_ratio": {"median": median, "low": low, "high": high, "least": min(of_steps)},
        "step_seconds": statistics.median(whole for _, whole in steps),
        "samples": len(idle),
    }


def configurations(arguments: argparse.Namespace, ranks: int) -> list[tuple[str, int]]:
    """Return what is to be measured on so many ranks: schedule and microbatches."""
    found: list[tuple[str, int]] = []
    for schedule in arguments.schedules.split(","):
        numbers = [1] if schedule == "model_parallel" else arguments.microbatches.split(",")
        found += [
            (schedule, int(number))
            for number in numbers
            if schedule != "1f1b" or int(number) >= ranks
        ]
    return found


def print_row(row: dict[str, Any]) -> None:
    idle, formula = row["idle_ratio"], row["expected_ratio"]
    shown = (
        "" if formula is None else f"{100 * formula:5.1f} {100 * (idle['median'] - formula):+6.1f}"
    )
    print(
        f"{row['schedule']:<15}{row['ranks']:>3}{row['microbatches']:>4}"
        f"{100 * idle['median']:>8.1f} ({100 * idle['low']:.1f} to {100 * idle['high']:.1f})"
        f"{100 * idle['least']:>8.1f}   {shown}",
        flush=True,
    )


def main() -> None:
    """Measure each configuration and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ranks", default="2,4", help="comma separated")
    parser.add_argument("--microbatches", default="2,4,8,16", help="comma separated")
    parser.add_argument("--schedules", default="gpipe,1f1b", help="comma separated")
    parser.add_argument("--stage-seconds", type=float, default=0.05, help="forward of a stage")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    arguments = parser.parse_args()
    if not arguments.json:
        numbers = f"{'p':>3}{'m':>4}{'idle %':>8} (quartiles)"
        print(f"{'schedule':<15}{numbers}      least   formula, difference")
    rows = []
    for ranks in map(int, arguments.ranks.split(",")):
        wanted = configurations(arguments, ranks)
        runs = [
            [*arguments_of(schedule, ranks, number, arguments.stage_seconds),
             "--steps", str(arguments.steps + 2)]
            for schedule, number in wanted
        ]  # fmt: skip
        measured = measure(ranks, runs)
        for (schedule, number), by_rank in zip(wanted, measured, strict=True):
            rows.append(row_of(schedule, ranks, number, by_rank))
            if not arguments.json:
                print_row(rows[-1])
    if arguments.json:
        import torch

        machine = {"cores": os.cpu_count(), "torch": torch.__version__}
        print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
