"""Is what a fault is said to cost what it costs? Pairs of runs with and without it.

    python benchmarks/real_costs.py [--pairs 3] [--faults NAME,...] [--steps N] [--out FILE]

Each pair is the trainer twice under `rankscope run` with the same seed and flags, once with the
fault and once without, one right after the other; which comes first changes from pair to pair. The
truth is the mean step by the trainer's own clock (`--step-times`), from the first step with the
fault on; what is said is the cost in the finding that names the fault. Two runs that are more than
5 % apart before the fault cannot be compared: the machine was busy in one. Writes one JSON object
per pair to --out, which the score card reads. Exit code 1 if the median difference of a fault is
above two points of a hundred, or its cost is never said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

from real_ranks import CASES, ROOT, STEP_TIMES, Case, Server, run_case

from tests.score.real import CostPair, cost_rows, pair_of, read, write

SLOW = (
    "slow_compute", "slow_forward", "slow_backward", "slow_data", "contention", "gc_pause",
    "hiccup", "slow_checkpoint", "slow_epoch_start", "slow_link",
)  # fmt: skip
MAX_POINTS = 2.0
RESULTS = ROOT / "benchmarks" / "results" / "real_costs.jsonl"


def run_pair(server: Server, case: Case, seed: int, directory: Path) -> CostPair | None:
    """Run both, in an order that changes with the seed."""
    planted = [seed % 2 == 1, seed % 2 == 0]
    runs = {one: run_case(server, case, seed, directory, is_planted=one) for one in planted}
    name = f"{case.fault}-{case.strategy}-{seed}"
    return pair_of(
        runs[True], directory / name / STEP_TIMES, directory / f"{name}-without" / STEP_TIMES
    )


def main() -> int:
    """Run all pairs, print as they come, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="pairs of each fault")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--faults", default=",".join(SLOW), help="only these, with commas between")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: as the fault needs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this directory")
    chosen = parser.parse_args()
    cases = [case for case in CASES if case.fault in chosen.faults.split(",")]
    if chosen.steps:
        cases = [dataclasses.replace(case, steps=chosen.steps) for case in cases]
    pairs: list[CostPair] = []
    print(*cost_rows([])[:1], sep="\n")
    with tempfile.TemporaryDirectory(prefix="rankscope-costs-") as scratch:
        directory = chosen.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        server = Server(directory)
        try:
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.pairs):
                for case in cases:
                    pair = run_pair(server, case, seed, directory)
                    if pair is None:
                        print(f"{case.fault}, seed {seed}: no cost, too few steps with the fault")
                        continue
                    pairs.append(pair)
                    print(cost_rows([pair])[-1], flush=True)
                    chosen.out.parent.mkdir(parents=True, exist_ok=True)
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(pair)) + "\n")
        finally:
            server.close()
    write(chosen.out, read(CostPair, chosen.out))
    return summary(pairs)


def summary(pairs: list[CostPair]) -> int:
    """Print the median difference by fault; return the exit code."""
    is_wrong = not pairs
    for fault in dict.fromkeys(one.fault for one in pairs):
        mine = [one for one in pairs if one.fault == fault and one.is_comparable]
        errors = [abs(one.error_points) for one in mine if one.error_points is not None]
        text = f"{statistics.median(errors):.1f} points" if errors else "no cost said"
        print(f"{fault:<24}{text}, {len(errors)} of {len(mine)} comparable pairs named")
        is_wrong |= not errors or statistics.median(errors) > MAX_POINTS
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
