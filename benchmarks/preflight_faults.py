"""Every fault of the preflight laboratory: what plain torchrun does, what preflight says.

    python benchmarks/preflight_faults.py --torchrun [NAME[:MODE] ...]   hours; 12 launches at once
    python benchmarks/preflight_faults.py --preflight [NAME ...]         one after the other
    python benchmarks/preflight_faults.py --healthy 20                   and 2, 4, 8, 16 hosts
    python benchmarks/preflight_faults.py --table                        docs/preflight_faults.md

Each writes JSON lines to benchmarks/results; of two rows of the same thing the newer one holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.preflight_table import DOCUMENT, FOUND, TORCHRUN, load, table
from tests.preflight.faults import BY_NAME, FAULTS, HEALTHY, HEALTHY_TAP, Fault
from tests.preflight.trial import Trial, Way, attempt, describe, misses

ROOT = Path(__file__).parents[1]
NUM_AT_ONCE = 12  # a launch waits far more than it computes; 0.7 GB each
STAGGER_S = 6.0  # importing torch six times is what computes
SIZES = (2, 4, 8, 16)  # beside 3
_writing = threading.Lock()


def measure_torchrun(wanted: list[str], num_at_once: int) -> int:
    """Launch torchrun under every wanted fault; what is in the result file is not run again."""
    known = {(row["fault"], row["mode"]) for row in load(TORCHRUN)}
    launches = [pair for pair in _pairs(wanted) if pair not in known]
    print(f"{len(launches)} launches, {len(known)} known", flush=True)
    gate = threading.Lock()

    def one(pair: tuple[str, str]) -> bool:
        with gate:
            time.sleep(STAGGER_S)
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "preflight_launch.py"), *pair],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(f"{':'.join(pair)} failed: {done.stderr[-2000:]}", flush=True)
            return False
        _keep(TORCHRUN, json.loads(done.stdout.splitlines()[-1]))
        print(f"{time.strftime('%H:%M:%S')} {':'.join(pair)}", flush=True)
        return True

    with ThreadPoolExecutor(num_at_once) as pool:
        results = list(pool.map(one, launches))
    return 0 if all(results) else 1


def measure_preflight(faults: Iterable[Fault]) -> int:
    """Run preflight under each fault, alone on the machine."""
    wrong = 0
    for fault in faults:
        row = _row(attempt(fault))
        _keep(FOUND, row)
        wrong += bool(row["misses"])
        print(f"{fault.name:24} {row['elapsed_s']:5.1f} s  {row['misses'] or 'right'}", flush=True)
    return 1 if wrong else 0


def measure_healthy(times: int) -> int:
    """Run preflight where nothing is wrong: on both wires in turn, then with more hosts."""
    plan = [(HEALTHY_TAP if turn % 2 else HEALTHY, 3) for turn in range(times)]
    plan += [(HEALTHY, size) for size in SIZES]
    wrong = 0
    for fault, num_hosts in plan:
        row = {**_row(attempt(fault, Way(num_hosts=num_hosts))), "num_hosts": num_hosts}
        _keep(FOUND, row)
        wrong += bool(row["misses"])
        told = row["misses"] or "clean"
        print(f"{fault.name:12} {num_hosts:3} hosts {row['elapsed_s']:5.1f} s  {told}", flush=True)
    return 1 if wrong else 0


def _row(trial: Trial) -> dict[str, Any]:
    findings = trial.answers[0].loud
    return {
        "fault": trial.fault.name,
        "elapsed_s": round(trial.elapsed_s, 1),
        "load": round(os.getloadavg()[0], 1),
        "nodes": {answer.node: round(answer.elapsed_s, 1) for answer in trial.answers},
        "exits": [answer.exit_code for answer in trial.answers],
        "findings": [
            {"id": f.id, "status": f.status, "title": f.title, "told": describe(f),
             "fix": f.fix[0].command if f.fix else "", "would": f.impact}
            for f in findings
        ],
        "unknown": sorted(
            {row.id for a in trial.answers if a.verdict for row in a.verdict.results
             if row.status == "unknown"}
        ),
        "misses": misses(trial),
    }  # fmt: skip


def _keep(path: Path, row: dict[str, Any]) -> None:
    with _writing, path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _pairs(wanted: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in wanted or list(BY_NAME):
        name, _, mode = text.partition(":")
        pairs += [(name, one) for one in ((mode,) if mode else BY_NAME[name].modes)]
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchrun", nargs="*", metavar="NAME[:MODE]")
    parser.add_argument("--at-once", type=int, default=NUM_AT_ONCE)
    parser.add_argument("--preflight", nargs="*", metavar="NAME")
    parser.add_argument("--healthy", type=int, metavar="TIMES")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    code = 0
    if chosen.torchrun is not None:
        os.nice(10)
        code |= measure_torchrun(chosen.torchrun, chosen.at_once)
    if chosen.preflight is not None:
        names = chosen.preflight or [fault.name for fault in FAULTS]
        code |= measure_preflight(BY_NAME[name] for name in names)
    if chosen.healthy is not None:
        code |= measure_healthy(chosen.healthy)
    if chosen.table:
        DOCUMENT.write_text(table())
        print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
