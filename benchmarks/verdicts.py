"""Is the verdict right? The demo, many times, with faults drawn at random, and clean runs.

    python benchmarks/verdicts.py [--faults 20] [--clean 10] [--seed 1] [--json]

Each run is `rankscope demo --once --json` in a directory of its own, as a user would start it.
The truth comes from the trainer's manifest of what really fired. Exit code 1 if fewer than 19 of
20 are right, a healthy rank is accused, a clean run has a finding above info, or a hang takes
longer than 10 s to be named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FAULTS = ("slow_compute", "slow_data", "hang", "crash")
STRATEGIES = ("ddp", "pipeline")
RIGHT_SHARE = 19 / 20
HANG_SECONDS = 10.0


def run_once(
    fault: str, strategy: str, seed: int, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Run one demo and return its JSON with what this benchmark adds."""
    with tempfile.TemporaryDirectory(prefix="rankscope-verdicts-") as directory:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", "demo", "--once", "--json", "--fault", fault,
             "--strategy", strategy, "--seed", str(seed), "--data-dir", directory, "--port", "0"],
            capture_output=True, text=True, check=False, timeout=900,
            env={**os.environ, **environment},
        )  # fmt: skip
        if done.returncode not in (0, 1):
            raise SystemExit(f"demo failed ({done.returncode}): {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
    answer |= {"fault": fault, "strategy": strategy, "seed": seed}
    answer["wall_seconds"] = time.monotonic() - began
    return answer


def judge(answer: dict[str, Any]) -> str:
    """Return "right", or what is wrong with the answer."""
    truth, verdict = answer["truth"], answer["verdict"]
    others = [finding for finding in answer["findings"] if finding["severity"] != "info"]
    if truth is None:
        return "right" if not others else f"false alarm: {others[0]['what']}"
    accused = {rank for finding in others for rank in finding["ranks"]} - {truth["rank"]}
    if accused:
        return f"accuses healthy ranks {sorted(accused)}"
    if verdict is None:
        return "said nothing"
    if not answer["match"]:
        return f"wrong: {verdict['kind']} on {verdict['ranks']}"
    if truth["fault"] == "hang" and answer["named_after_seconds"] > HANG_SECONDS:
        return f"hang named after {answer['named_after_seconds']:.1f} s"
    return "right"


def names_others_as_info(answer: dict[str, Any]) -> bool:
    """Return whether a finding of severity info names a rank that had no fault."""
    culprit = (answer["truth"] or {}).get("rank")
    notes = [finding for finding in answer["findings"] if finding["severity"] == "info"]
    return any(rank != culprit for finding in notes for rank in finding["ranks"])


def describe(answer: dict[str, Any], judgement: str) -> str:
    """Return one line of the table."""
    truth, verdict = answer["truth"] or {}, answer["verdict"] or {}
    named = answer.get("named_after_seconds")
    return (
        f"{answer['strategy']:<9}{answer['fault']:<13}rank {truth.get('rank', '-')!s:<3}"
        f"step {truth.get('start_step', '-')!s:<5}onset {verdict.get('onset_step', '-')!s:<5}"
        f"cost {verdict.get('cost_throughput_ratio') or 0:.2f}  "
        f"named after {'-' if named is None else f'{named:.1f} s':<8}"
        f"{answer['wall_seconds']:.0f} s  {judgement}"
    )


def main() -> int:
    """Run all, print as they come, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="runs with a fault")
    parser.add_argument("--clean", type=int, default=10, help="runs without one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    plan = [(FAULTS[n % 4], STRATEGIES[n // 4 % 2]) for n in range(arguments.faults)]
    plan += [("none", STRATEGIES[n % 2]) for n in range(arguments.clean)]
    answers, judgements = [], []
    for fault, strategy in plan:
        answers.append(run_once(fault, strategy, chance.randrange(10**6)))
        judgements.append(judge(answers[-1]))
        if not arguments.json:
            print(describe(answers[-1], judgements[-1]), flush=True)
    faulty, clean = judgements[: arguments.faults], judgements[arguments.faults :]
    right, quiet = faulty.count("right"), clean.count("right")
    hangs = [a["named_after_seconds"] for a in answers if a["named_after_seconds"] is not None
             and a["fault"] == "hang"]  # fmt: skip
    summary = {
        "cores": os.cpu_count(),
        "right": right, "faults": len(faulty), "quiet": quiet, "clean": len(clean),
        "runs_naming_healthy_as_info": sum(map(names_others_as_info, answers)),
        "accused_healthy": sum("accuses" in judgement for judgement in judgements),
        "hang_named_seconds": {"median": statistics.median(hangs), "max": max(hangs)}
        if hangs else None,
        "wall_seconds_median": statistics.median(a["wall_seconds"] for a in answers),
    }  # fmt: skip
    print(json.dumps(summary | {"answers": answers} if arguments.json else summary))
    enough = right >= RIGHT_SHARE * len(faulty)
    return 0 if enough and quiet == len(clean) and not summary["accused_healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
