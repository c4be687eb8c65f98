"""Kill, stop and bring ranks again and again, without a restart: is it training as undisturbed?

    python benchmarks/regrouping.py
    python benchmarks/regrouping.py --changes 5 --seed 7

Each change is drawn: a rank is killed and one that stands by takes its place, or it is stopped for
longer than the others wait and then continues. Compared are the windows of each step, and the mean
of its losses, with those of one process that is not disturbed. Sums in another order round
otherwise, and training amplifies that; so the same ranks train undisturbed too, and drift from one
process by what is rounding alone. A row is added to `benchmarks/results/regrouping.jsonl`. Exit
status 1 where a step is missing, a window is lost or trained twice, or losses drift by more than
2e-5 and by more than twice what they drift undisturbed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.scenarios import regrouping
from tests.scenarios.regrouping import ROUNDING, RegroupingRun, compare

RESULTS = Path(__file__).with_name("results") / "regrouping.jsonl"
RANKS, BATCH, STEPS_BETWEEN = 3, 12, 10
STOP_EVERY = 4  # changes: waiting for a stopped rank takes twice the patience
PATIENCE_SECONDS = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change, and how long it kept the others: from the signal to their next step."""

    kind: str
    rank: int
    step: int
    without_seconds: float  # until a step was trained without the rank
    whole_seconds: float  # until one was trained with it, or with what took its place


def change(run: RegroupingRun, kind: str, rank: int) -> Change:
    """Do one thing to one rank; return when the job was whole again."""
    step, began = run.last_step(), time.monotonic()
    run.send(rank, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    run.until_ranks(*(set(range(RANKS)) - {rank}))
    without = time.monotonic() - began
    if kind == "stopped":
        run.send(rank, signal.SIGCONT)
    run.until_ranks(*range(RANKS))
    whole = time.monotonic() - began
    return Change(
        kind=kind, rank=rank, step=step,
        without_seconds=round(without, 2), whole_seconds=round(whole, 2),
    )  # fmt: skip


def undisturbed(folder: Path, flags: list[str]) -> float:
    """Return by how much the losses of ranks that are left in peace drift from one process."""
    folder.mkdir()
    run = RegroupingRun(folder, RANKS, *flags, launcher=[], patience_seconds=PATIENCE_SECONDS)
    try:
        if run.finish():
            raise RuntimeError("the undisturbed run failed")
        return compare(run).worst
    finally:
        run.close()


def main() -> int:
    """Disturb one job, and print what became of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    regrouping.WAIT_SECONDS = 7200.0
    chooser = random.Random(options.seed)
    steps = 30 * options.changes
    flags = ["--batch-size", "2", "--global-batch", str(BATCH), "--steps", str(steps)]
    changes: list[Change] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "disturbed").mkdir()
        run = RegroupingRun(
            Path(folder) / "disturbed", RANKS, *flags, "--layer-seconds", "0.02",
            launcher=["--standby", "1", "--replace", str(options.changes)],
            patience_seconds=PATIENCE_SECONDS,
        )  # fmt: skip
        try:
            for number in range(options.changes):
                run.until_step(run.last_step() + chooser.randrange(1, STEPS_BETWEEN))
                kind = "stopped" if number % STOP_EVERY == STOP_EVERY - 1 else "killed"
                changes.append(change(run, kind, chooser.randrange(RANKS)))
                sys.stdout.write(f"{changes[-1]}\n")
                sys.stdout.flush()
            code = run.finish()
            found = compare(run)
        finally:
            run.close()
        alone = undisturbed(Path(folder) / "undisturbed", flags)
    is_right = found.is_whole and found.worst <= max(ROUNDING, 2 * alone)
    waits = [one.without_seconds for one in changes if one.kind == "killed"]
    row = {
        "seed": options.seed, "ranks": RANKS, "steps": steps, "cores": os.cpu_count(),
        "torch": torch.__version__, "code": code, "changes": len(changes),
        "killed": len(waits), "killed_seconds_median": statistics.median(waits),
        "windows": BATCH * steps, **dataclasses.asdict(found), "undisturbed_worst": alone,
        "is_right": is_right,
        "each": [dataclasses.asdict(one) for one in changes],
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps({k: v for k, v in row.items() if k != "each"}, indent=1) + "\n")
    return 0 if is_right and code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
