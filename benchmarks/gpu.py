"""What Rankscope says of ranks over NCCL, on a machine with one GPU; see `gpu_program.py`.

    python benchmarks/gpu.py [--models ddp,fsdp] [--faults none,gpu,host,hang,crash,kill]
                             [--read-every 1,10] [--at-once 2]
    python benchmarks/gpu.py --cost [--models ddp,fsdp] [--pairs 3]

Each fault once, on ranks that share the GPU: who was accused, of what, how long after it began.
`--cost` trains one rank with the agent and without, in turns: the same losses to the last bit, and
what a step takes. Prints one JSON object per run. Exit code 1 if a healthy rank is accused, a fault
is not named, a loss differs or "healthy" is said over a loss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from real_ranks import ROOT, Server, findings_of

PROGRAM = ROOT / "benchmarks" / "gpu_program.py"
KINDS = {
    "gpu": ("slow_compute",), "host": ("slow_compute",), "hang": ("hang",),
    "crash": ("crash",), "kill": ("crash",),
}  # fmt: skip
ENDS = ("hang", "crash", "kill")  # the run does not outlive them
AFTER_S, SECONDS = 12.0, 65.0
SETTLE_S = 8.0
COST_STEPS, COST_WARM_UP = 1500, 300


def _environment() -> dict[str, str]:
    """Return what is there, with no more of our settings than the source of collectives."""
    kept = {
        name: text for name, text in os.environ.items()
        if name == "RANKSCOPE_COLLECTIVES" or not name.startswith("RANKSCOPE")
    }  # fmt: skip
    return kept | {"OMP_NUM_THREADS": "1"}


def run_one(
    server: Server, model: str, fault: str, read_every: int, ranks: int, folder: Path,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Run the program with a fault of its last rank and return what was said of it."""
    run_id, culprit = f"{model}-{fault}-{read_every}", ranks - 1
    command = [
        sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", run_id,
        "--dir", str(folder / run_id), "--", sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(ranks), str(PROGRAM), "--model", model,
        "--fault", fault,
        "--rank", str(culprit), "--after", str(AFTER_S), "--read-every", str(read_every),
        "--seconds", str(seconds),
    ]  # fmt: skip
    began, first_step_at = time.monotonic(), None
    named: dict[str, float] = {}
    accused: set[str] = set()
    states: list[str] = []
    with (folder / f"{run_id}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
    ended_at = None
    while ended_at is None or time.monotonic() - ended_at < SETTLE_S:
        time.sleep(1.0)
        now = time.monotonic()
        overview = server.get(f"runs/{run_id}")
        if first_step_at is None and (overview.get("run") or {}).get("step"):
            first_step_at = now
        for one in findings_of(server, run_id):
            if one["severity"] == "info":
                continue
            named.setdefault(f"{one['kind']} {one['ranks']}", round(now - began, 1))
            if set(one["ranks"]) - {culprit} or fault == "none":
                accused.add(f"{one['kind']} {one['ranks']}: {one['what']}")
        state = (overview.get("answer") or {}).get("state", "")
        if state and (not states or states[-1] != state):
            states.append(state)
        if ended_at is None and process.poll() is not None:
            ended_at = now
        if now - began > seconds + 150.0:
            process.terminate()
            process.wait()
            break
    overview = server.get(f"runs/{run_id}")
    verdict = overview.get("verdict") or {}
    is_named = any(
        verdict.get("kind") == kind and verdict.get("ranks") == [culprit]
        for kind in KINDS.get(fault, ())
    )
    right = not accused and (is_named or fault == "none")
    return {
        "run": run_id, "right": right, "accused": sorted(accused), "named": named,
        "verdict": verdict.get("what", ""), "kind": verdict.get("kind", ""),
        "ranks": verdict.get("ranks"), "answer": overview.get("answer"), "states": states,
        "first_step_s": first_step_at and round(first_step_at - began, 1),
        "step": (overview.get("run") or {}).get("step"), "exit": process.returncode,
        "wall_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def costs(model: str, pairs: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Train one rank with the agent and without, in turns; yield what each pair shows."""
    for pair in range(pairs):
        found: dict[str, Any] = {"model": model, "pair": pair}
        for with_agent in (False, True):
            name = "with" if with_agent else "without"
            base = folder / f"{model}-{name}-{pair}"
            watched = [sys.executable, "-m", "rankscope", "run", "--dir", f"{base}.run", "--"]
            command = [
                *(watched if with_agent else []), sys.executable, "-m", "torch.distributed.run",
                "--standalone", "--nproc-per-node", "1", str(PROGRAM), "--model", model,
                "--steps", str(COST_STEPS), "--seconds", "1000", "--read-every", "10",
                "--losses", f"{base}.losses", "--times", f"{base}.times",
            ]  # fmt: skip
            done = subprocess.run(command, env=_environment(), capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()[-2000:]
            times = [float(line) for line in Path(f"{base}.times").read_text().split()]
            found[f"{name}_step_ms"] = round(1e3 * statistics.fmean(times[COST_WARM_UP:]), 4)
            found[f"{name}_losses"] = Path(f"{base}.losses").with_suffix(".0").read_text()
        same = found.pop("with_losses") == found.pop("without_losses")
        yield found | {"right": same, "same_losses": same}


def main() -> int:
    """Run what was asked for, print as it comes, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="ddp")
    parser.add_argument("--faults", default="none,gpu,host,hang,crash,kill")
    parser.add_argument("--read-every", default="1", help="steps between reads of the loss")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1, help="runs, of those that use the GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--pairs", type=int, default=3, help="of runs, for --cost")
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this directory")
    arguments = parser.parse_args()
    all_right = True

    def report(result: dict[str, Any]) -> None:
        nonlocal all_right
        all_right = all_right and result["right"]
        print(json.dumps(result), flush=True)

    with tempfile.TemporaryDirectory(prefix="rankscope-gpu-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.cost:
            for model in arguments.models.split(","):
                for found in costs(model, arguments.pairs, folder):
                    report(found)
            return not all_right
        server = Server(folder)
        try:
            cases = [
                (model, fault, int(every))
                for model in arguments.models.split(",")
                for every in arguments.read_every.split(",")
                for fault in arguments.faults.split(",")
            ]

            def one(case: tuple[str, str, int]) -> dict[str, Any]:
                return run_one(server, *case, arguments.ranks, folder, arguments.seconds)

            # those that end by themselves hardly use the GPU: all at once
            with ThreadPoolExecutor(8) as pool:
                for found in pool.map(one, [case for case in cases if case[1] in ENDS]):
                    report(found)
            with ThreadPoolExecutor(arguments.at_once) as pool:
                for found in pool.map(one, [case for case in cases if case[1] not in ENDS]):
                    report(found)
        finally:
            server.close()
    return not all_right


if __name__ == "__main__":
    sys.exit(main())
