"""Agents of preflight that die, stop or are interrupted at random moments: who is named, how soon.

    python benchmarks/preflight_deaths.py --moments 20    three nodes x three ways x 20 moments
    python benchmarks/preflight_deaths.py --table         what was measured

Three nodes in namespaces of one machine; the moment is counted from when the node listens. Rows go
to benchmarks/results/preflight_deaths.jsonl as they come: it goes on where it was stopped. Exit
codes: 0 all named right, within 15 s, with exit 3 and nothing left; 1 not all.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.preflight.deaths import SIGNALS, die
from tests.preflight.nslab import reexec_in_userns

ROWS = Path(__file__).with_name("results") / "preflight_deaths.jsonl"
MOST_S = 15.0
LAST_S = 9.0  # a quiet run of three nodes takes that long


def rows() -> list[dict[str, Any]]:
    """Return what was measured."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def measure(num_moments: int, seed: int) -> None:
    """Measure what is not known yet."""
    known = {(row["end"], row["victim"], row["number"], row["seed"]) for row in rows()}
    for number, end, victim in itertools.product(range(num_moments), SIGNALS, range(3)):
        if (end, f"node{victim}", number, seed) in known:
            continue
        after_s = random.Random(f"{seed} {end} {victim} {number}").uniform(0.0, LAST_S)
        death = die(end, victim, round(after_s, 2))
        row = {**dataclasses.asdict(death), "number": number, "seed": seed,
               "wrong": death.wrong(MOST_S), "load": os.getloadavg()[0]}  # fmt: skip
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{end} node{victim} {after_s:.1f} s ({death.stage}): {death.took_s:.1f} s",
              *row["wrong"], flush=True)  # fmt: skip


def table() -> bool:
    """Print a line for each way; return whether all were right."""
    found = rows()
    for end in SIGNALS:
        some = [row for row in found if row["end"] == end]
        took = sorted(row["took_s"] for row in some if row["stage"] != "done")
        right = sum(not row["wrong"] for row in some)
        if took:
            print(f"{end}: {right} of {len(some)} right; the others end after a median of "
                  f"{statistics.median(took):.1f} s, at most {took[-1]:.1f} s")  # fmt: skip
    return bool(found) and not any(row["wrong"] for row in found)


def main() -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=0, help="of each node and way")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what is known; the default")
    chosen = parser.parse_args()
    reexec_in_userns()
    measure(chosen.moments, chosen.seed)
    return 0 if table() else 1


if __name__ == "__main__":
    sys.exit(main())
