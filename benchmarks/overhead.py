"""What the agent costs a DDP run: paired blocks of steps with and without it, in one process.

    python benchmarks/overhead.py [--json] [--pairs 30] [--variants agent,probe,profiler]

Each rank trains the same model of 5 M parameters in alternating blocks of steps. In half of the
blocks the variant is in, in the other half it is taken out, kernels included. Compared is the CPU
time of the main thread and of the whole process per step (the machine's other load hardly enters
it), and the wall time beside it, which on shared cores is noisy. Peers run in the same way:
torch.profiler always on, TraceML (`pip install traceml-ai`) where it is there, with its aggregator,
and bare against bare, which shows what the method itself cannot tell apart.

One step of a tiny model on one rank, hot and cold, tells the same cost in microseconds, without
that noise. Then one rank alone, and four ranks, call all_reduce, hot (in a tight loop) and cold (a
matrix product and a pass over 24 MB before each call), with each source of collectives and without
in turn: CPU that a call costs the calling thread more. `floor` is what PyTorch itself takes to call
a Python kernel that does nothing; the rest of `kernels` is ours. `--counts ""` leaves the jobs out:

    python benchmarks/overhead.py --counts "" --call-ranks 4 --variants probe,kernels,floor
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overhead_rank import VARIANTS, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.ports import free_port

RANK = Path(__file__).with_name("overhead_rank.py")
CALLS = ("probe", "official", "kernels", "floor")


def start_rank(
    arguments: argparse.Namespace, job: str, variant: str, collectives: int = 1, ranks: int = 1
) -> dict[str, Any]:
    """Run one configuration and return what its rank 0 printed."""
    launcher = [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, *(launcher if job == "worker" or ranks > 1 else []), str(RANK), job,
             "--variant", variant, "--pairs", str(arguments.pairs),
             "--batch", str(arguments.batch), "--collectives", str(collectives)],
            env=os.environ | {"RANKSCOPE_DIR": directory, "OMP_NUM_THREADS": "1", "RANKSCOPE": "0"}
            | arguments.traceml,
            capture_output=True, text=True, check=False, cwd=directory,
        )  # fmt: skip
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"skipped": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:200]}


@contextlib.contextmanager
def traceml_aggregator(variants: list[str]) -> Iterator[dict[str, str]]:
    """Run TraceML's own aggregator, without which it records nothing; yield what ranks need."""
    if "traceml" not in variants or importlib.util.find_spec("traceml_ai") is None:
        yield {}
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        served = subprocess.Popen(
            [sys.executable, "-c", "from traceml_ai.launcher.cli import main; main()", "serve",
             "--aggregator-port", str(port), "--run-name", "overhead", "--logs-dir", directory],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield {
                "TRACEML_AGGREGATOR_PORT": str(port),  # ranks wait for it for 10 s
                "TRACEML_SESSION_ID": "overhead",
                "TRACEML_LOGS_DIR": directory,
            }
        finally:
            served.terminate()
            served.wait()


def measure(arguments: argparse.Namespace, variant: str, collectives: int) -> dict[str, Any]:
    """Return medians and quartiles of one variant over its pairs of blocks."""
    row: dict[str, Any] = {"variant": variant, "collectives_per_step": collectives}
    found = start_rank(arguments, "worker", variant, collectives, arguments.ranks)
    if "skipped" in found:
        return row | {"skipped": found["skipped"]}
    pairs = found["pairs"]
    extra = [(a[1] - b[1]) * 1e6 / collectives for a, b in pairs]
    return row | {
        "recorded_per_step": found["num_collectives"],
        "step_ms": statistics.median(b[0] for _, b in pairs) * 1e3,
        "main_thread_us_per_collective": spread(extra),
        "main_thread_cpu_ratio": spread([a[1] / b[1] for a, b in pairs]),
        "process_cpu_ratio": spread([a[2] / b[2] for a, b in pairs]),
        "wall_ratio": spread([a[0] / b[0] for a, b in pairs]),
        "pairs": len(pairs),
    }


def text(values: dict[str, float], digits: int) -> str:
    """Write a median and its quartiles."""
    return (
        f"{values['median']:.{digits}f} ({values['low']:.{digits}f} to {values['high']:.{digits}f})"
    )


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table of the jobs, if there were any."""
    if not rows:
        return
    print(f"{'variant':<10}{'n':>4}{'step ms':>9}  {'main us/collective':<26}"
          f"{'main CPU ratio':<26}{'process CPU':>12}{'wall':>8}")  # fmt: skip
    for row in rows:
        head = f"{row['variant']:<10}{row['collectives_per_step']:>4}"
        if "skipped" in row:
            print(f"{head}  skipped: {row['skipped']}")
            continue
        print(f"{head}{row['step_ms']:>9.1f}  {text(row['main_thread_us_per_collective'], 0):<26}"
              f"{text(row['main_thread_cpu_ratio'], 3):<26}"
              f"{row['process_cpu_ratio']['median']:>12.3f}"
              f"{row['wall_ratio']['median']:>8.3f}")  # fmt: skip


def measure_steps(arguments: argparse.Namespace, variants: list[str]) -> list[dict[str, Any]]:
    """Measure one small step with each variant; print the rows as they come."""
    rows = []
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'one step':<12}{'hot us':<24}{'cold us':<26}", file=out)
    for variant in (name for name in variants if name not in ("floor", "profiler")):
        found = start_rank(arguments, "step", variant, collectives=3)
        rows.append({"variant": variant} | found)
        says = found.get("skipped") or f"{text(found['hot_us'], 0):<24}{text(found['cold_us'], 0)}"
        print(f"{variant:<12}{says}", file=out, flush=True)
    return rows


def measure_calls(arguments: argparse.Namespace, variants: list[str]) -> list[dict[str, Any]]:
    """Measure one call with each source on each number of ranks; print the rows as they come."""
    rows = []
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'all_reduce':<12}{'ranks':>5}  {'hot us':<24}{'cold us':<26}"
          f"{'bare hot':>9}{'bare cold':>10}", file=out)  # fmt: skip
    for ranks in map(int, arguments.call_ranks.split(",")):
        for variant in (name for name in CALLS if name in variants):
            found = start_rank(arguments, "micro", variant, ranks=ranks)
            rows.append({"ranks": ranks, "variant": variant} | found)
            print(call_text(rows[-1]), file=out, flush=True)
    return rows


def call_text(row: dict[str, Any]) -> str:
    """Return what one call costs more, and what it costs without."""
    head = f"{row['variant']:<12}{row['ranks']:>5}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    bare = f"{row['bare_hot_us']['median']:>9.1f}{row['bare_cold_us']['median']:>10.1f}"
    return f"{head}  {text(row['hot_us'], 1):<24}{text(row['cold_us'], 1):<26}{bare}"


def main() -> None:
    """Measure each variant at each number of collectives and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of blocks, with and without")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma separated")
    parser.add_argument("--counts", default="1,3,10,40,300", help="collectives per step")
    parser.add_argument("--call-ranks", default="1,4", help="ranks of the measured single calls")
    arguments = parser.parse_args()
    import torch

    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine()}
    counts = [int(count) for count in arguments.counts.split(",") if count]
    variants = arguments.variants.split(",")
    with traceml_aggregator(variants) as arguments.traceml:
        rows = [measure(arguments, variant, count) for count in counts for variant in variants]
        one_step = measure_steps(arguments, variants)
        one_call = measure_calls(arguments, variants)
        taken = start_rank(arguments, "memory", "agent")
    if arguments.json:
        print(json.dumps({
            "machine": machine, "rows": rows, "one_step": one_step, "one_call": one_call,
            "memory": taken,
        }))  # fmt: skip
        return
    print(f"{machine['cores']} cores, {arguments.ranks} ranks, torch {machine['torch']}, medians "
          f"(quartiles) of {arguments.pairs} pairs of blocks")  # fmt: skip
    print_rows(rows)
    print("memory of the agent in a rank: " + ", ".join(
        f"{name.removesuffix('_bytes')} {size / (1 << 20):.1f} MiB" for name, size in taken.items()
    ))  # fmt: skip


if __name__ == "__main__":
    main()
