"""What a recorded run is said to take if it were otherwise, beside what it then takes here.

    python benchmarks/what_if.py                   all runs that have no row yet, then the table
    python benchmarks/what_if.py --runs "ddp on 2;fsdp on 2"
    python benchmarks/what_if.py --table --write   run nothing; put the table into docs/plan.md

One server takes all runs; each is the trainer under `rankscope run`. A row is what the server reads
of a run, so the table is made by today's planner. Layers sleep for most of their time, as this
machine has fewer cores than ranks; messages and updates are real. `load` is what else ran.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from rows import ROOT, Rows, newest, parser_of

from rankscope.http import get
from rankscope_server.api.runs.queries import run_row
from rankscope_server.api.what_if.recording import recorded_of
from rankscope_server.what_if.answers import REPLAY_MISSED, Change, answer
from rankscope_server.what_if.recorded import Recorded

DOCUMENT = ROOT / "docs" / "plan.md"
BEGIN = "<!-- recorded, predicted and measured: made by benchmarks/what_if.py -->"
END = "<!-- end of recorded, predicted and measured -->"
KEYS = ("run",)
STEPS = 24
START_SECONDS = 60.0
COMMON = (
    "--device cpu --data-bytes 200000 --log-every 100000 --layers 8 --width 192 --heads 4 "
    f"--context 16 --steps {STEPS}"
)
TWO = "--microbatches 2 --batch-size 4 --layer-seconds 0.03"
EIGHT = "--microbatches 8 --batch-size 1 --layer-seconds 0.0075"
STAGES = "--strategy pipeline --schedule 1f1b --batch-size 4 --layer-seconds 0.03"
SLOW = "--fault slow_compute:rank=1,start=1,size=0.5"
RUNS: dict[str, tuple[int, str]] = {
    "ddp on 2": (2, f"--strategy ddp {TWO}"),
    "ddp on 2, 8 microbatches": (2, f"--strategy ddp {EIGHT}"),
    "ddp on 2, buckets of 5 MiB": (2, f"--strategy ddp {TWO} --bucket-mib 5"),
    "ddp on 3": (3, f"--strategy ddp {TWO}"),
    "ddp on 4": (4, f"--strategy ddp {TWO}"),
    "ddp on 3, rank 1 slow": (3, f"--strategy ddp {TWO} {SLOW}"),
    "fsdp on 2": (2, f"--strategy fsdp {TWO}"),
    "fsdp on 4": (4, f"--strategy fsdp {TWO}"),
    "1f1b on 2, 4 microbatches": (2, f"{STAGES} --microbatches 4"),
    "1f1b on 2, 16 microbatches": (
        2, "--strategy pipeline --schedule 1f1b --batch-size 1 --layer-seconds 0.0075 "
        "--microbatches 16",
    ),
}  # fmt: skip
_MIB = 1 << 20


@dataclass(frozen=True)
class Pair:
    """A run, a change of it, and the run that has it; `without` a rank by the replay."""

    recorded: str
    then: str
    change: Change
    without: int | None = None


PAIRS = (
    Pair("ddp on 2", "ddp on 2, 8 microbatches", Change(microbatches=8)),
    Pair("ddp on 2", "ddp on 2, buckets of 5 MiB", Change(bucket_bytes=5.0 * _MIB)),
    Pair("ddp on 2", "ddp on 3", Change(ranks_per_node=3)),
    Pair("ddp on 2", "ddp on 4", Change(ranks_per_node=4)),
    Pair("ddp on 4", "ddp on 2", Change(ranks_per_node=2)),
    Pair("ddp on 2", "fsdp on 2", Change(strategy="fsdp")),
    Pair("ddp on 2", "fsdp on 4", Change(strategy="fsdp", ranks_per_node=4)),
    Pair("ddp on 4", "fsdp on 4", Change(strategy="fsdp")),
    Pair("fsdp on 2", "ddp on 2", Change(strategy="ddp")),
    Pair("fsdp on 2", "fsdp on 4", Change(ranks_per_node=4)),
    Pair("1f1b on 2, 4 microbatches", "1f1b on 2, 16 microbatches", Change(microbatches=16)),
    Pair("ddp on 3, rank 1 slow", "ddp on 3", Change(), without=1),
)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Give the address of a server whose data is in a folder."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--data-dir"]
    command += [str(folder), "--ready-file", str(ready)]
    with (folder / "server.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if child.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((folder / "server.log").read_text())
                time.sleep(0.1)
            yield json.loads(ready.read_text())["url"]
        finally:
            child.terminate()
            child.wait()


def measure(name: str, url: str, folder: Path) -> dict[str, Any]:
    """Run the trainer once; return what the server reads of the run, and the replay's ratios."""
    ranks, flags = RUNS[name]
    run_id = "".join(sign if sign.isalnum() else "-" for sign in name)
    command = [sys.executable, "-m", "rankscope", "run", "--run-id", run_id, "--server", url, "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(ranks), "-m", "rankscope_trainer", *COMMON.split(), *flags.split()]
    # large blocks are mapped one by one, so that memory that is freed is seen to be free
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    variables["RANKSCOPE_DIR"] = str(folder / "ranks")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stdout}{done.stderr}")
    deadline = time.monotonic() + START_SECONDS
    while not get(url, f"/api/v1/runs/{run_id}/cost").fields["parts"]:  # the look at its end
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: the server does not work out what it cost")
        time.sleep(1.0)
    found = get(url, f"/api/v1/runs/{run_id}/what-if", timeout_seconds=60).fields
    ratios = {
        one["key"].partition("=")[2]: 1 / one["throughput_ratio"]
        for one in found["answers"]
        if one["key"].startswith("without=") and one["throughput_ratio"]
    }
    engine = sa.create_engine(f"sqlite:///{folder / 'rankscope.db'}")
    with engine.connect() as connection:
        recorded = recorded_of(connection, run_row(connection, run_id))
    load = round(os.getloadavg()[0], 1)
    return {"recorded": msgspec.to_builtins(recorded), "without": ratios, "load": load}


def predicted(
    pair: Pair, rows: dict[str, dict[str, Any]]
) -> tuple[float, float, float, float | None]:
    """Return step, bounds (ms) and memory (bytes) of a run with its change."""
    row = rows[pair.recorded]
    recorded = recorded_in(row)
    if pair.without is not None:
        step = recorded.step_ms * row["without"][str(pair.without)]
        return step, step * (1 - REPLAY_MISSED), step * (1 + REPLAY_MISSED), recorded.memory_bytes
    found = answer(recorded, pair.change)
    return found.step_ms, found.low_ms, found.high_ms, found.memory_bytes


def recorded_in(row: dict[str, Any]) -> Recorded:
    """Return what was recorded of a row's run."""
    return msgspec.convert(row["recorded"], Recorded)


def table(rows: list[dict[str, Any]]) -> str:
    """Return each pair of runs, what was predicted and what was measured."""
    by_run = {row["run"]: row for row in rows}
    lines, errors, inside, memories = [], [], 0, []
    for pair in PAIRS:
        if pair.recorded not in by_run or pair.then not in by_run:
            continue
        step, low, high, memory = predicted(pair, by_run)
        then = by_run[pair.then]
        now, took = recorded_in(by_run[pair.recorded]), recorded_in(then)
        errors.append(step / took.step_ms - 1)
        inside += low <= took.step_ms <= high
        said = "not known"
        if memory is not None:
            memories.append(memory / took.memory_bytes - 1)
            said = f"{took.memory_bytes / 1e6:.0f} MB, {memories[-1]:+.1%}"
        load = max(by_run[pair.recorded]["load"], then["load"])
        lines.append(
            f"| {pair.recorded} | {pair.then} | {now.step_ms:.0f} | {took.step_ms:.0f} | "
            f"{step:.0f} | {errors[-1]:+.1%} | {low:.0f} to {high:.0f} | {said} | "
            f"{load} |"
        )
    if not lines:
        return ""
    sizes, held = [abs(error) for error in errors], [abs(error) for error in memories]
    head = [
        f"Steps, {len(sizes)} changes: median error {statistics.median(sizes):.1%}, worst "
        f"{max(sizes):.1%}; {inside} within their band. Memory, {len(held)}: median error "
        f"{statistics.median(held):.1%}, worst {max(held):.1%}.",
        "",
        "| recorded | with the change | recorded, ms | measured, ms | predicted | error | band | "
        "memory measured, error | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines, ""])


def write(text: str) -> None:
    """Put the table into the document."""
    head, mark, rest = DOCUMENT.read_text().partition(BEGIN + "\n")
    assert mark, DOCUMENT
    DOCUMENT.write_text(head + mark + text + END + rest.partition(END)[2])


def main() -> None:
    parser = parser_of(__doc__, "what_if.jsonl", sources=(), seeds=1, least_seconds=0.0)
    parser.add_argument("--runs", default=";".join(RUNS), help="with ; between")
    parser.add_argument("--write", action="store_true", help="put the table into docs/plan.md")
    arguments = parser.parse_args()
    rows = Rows(arguments.out, KEYS, arguments.label)
    missing = rows.missing([(name,) for name in arguments.runs.split(";")])
    if missing and not arguments.table:
        with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url:
            for (name,) in missing:
                found = rows.add((name,), measure(name, url, Path(folder)))
                print(f"{name}: {found['recorded']['step_ms']:.0f} ms", flush=True)
    text = table(rows.all() or newest(arguments.out, KEYS))
    print(text)
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
