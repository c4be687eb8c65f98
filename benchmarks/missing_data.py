"""Drops any subset of rank, source and span from good recordings; nobody may be accused.

    python benchmarks/missing_data.py [--draws 10000] [--seconds 200] [--table]

Each draw takes one of the runs of `tests/analysis/missing.py`, with a fault or clean, drops what
its seed says, and gives the rest to the analysis of the server. Wrong is a healthy rank that is
accused in any look, and "healthy" where what is missing could hide something. Draws that were done
are kept in results/missing_data.jsonl, one line per kind of run and twenty seeds, so that it goes
on where it stopped; delete the file after a change of the detectors. Exits with 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.analysis.missing import NAMES, judged  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "missing_data.jsonl"
BLOCK = 20  # draws of one line
RUNS = 3  # different recordings of each kind


def block(name: str, number: int) -> dict[str, Any]:
    """Draw `BLOCK` cases of one kind of run."""
    cases = [judged(name, number * BLOCK + at, number % RUNS) for at in range(BLOCK)]
    return {
        "run": name,
        "block": number,
        "states": dict(sorted(Counter(one.state for one in cases).items())),
        "wrong": [
            {"seed": one.seed, "drops": [str(drop) for drop in one.drops], "what": one.wrong}
            for one in cases if one.wrong
        ],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return what was drawn and said, a line for each kind of fault."""
    lines = ["| run | draws | culprit named | advice | not known | waiting | healthy | wrong |"]
    lines.append("|" + "---|" * 8)
    faults = dict.fromkeys(row["run"].partition(" ")[2] for row in rows)
    for fault in (*faults, "all"):
        mine = [row for row in rows if fault in ("all", row["run"].partition(" ")[2])]
        states: Counter[str] = Counter()
        for row in mine:
            states.update(row["states"])
        names = ("culprit", "advice", "unknown", "waiting", "healthy")
        counts = [states[state] for state in names]
        wrong = sum(len(row["wrong"]) for row in mine)
        cells = (fault, f"{sum(states.values()):,}", *counts, wrong)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if (
        RESULTS.exists()
    ) else []  # fmt: skip
    done = {(row["run"], row["block"]) for row in rows}
    per_name = -(-given.draws // (len(NAMES) * BLOCK))
    wanted = [(name, number) for number in range(per_name) for name in NAMES]
    until = time.monotonic() + given.seconds
    with RESULTS.open("a") as file:
        for name, number in [] if given.table else wanted:
            if (name, number) not in done and time.monotonic() < until:
                rows.append(block(name, number))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    print(table(rows))
    for row in rows:
        for one in row["wrong"]:
            print(f"{row['run']}, seed {one['seed']}: {'; '.join(one['drops'])}: {one['what']}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
