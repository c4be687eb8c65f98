"""Is the demo right with a source by force, above all where there is no compiler?

    python benchmarks/bare_demo.py [--source bare] [--seeds 3] [--faults hang] [--strategies ddp]
    python benchmarks/bare_demo.py --table

Each run is `rankscope demo --once --json`, as a user would start it: 4 faults, 2 strategies, 3
seeds. `bare` takes away the compiler, the home and all that was compiled before; this machine's
packages stay (`make fresh` takes them away too). Goes on where it was stopped; results are in
benchmarks/results/bare_demo.jsonl, by version of PyTorch too: started with the Python of an
environment that has another one (`python tests/versions.py` makes them), it runs on that. Exit
code 1 unless every demo of this version is right.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forced import BARE, SOURCES, environment_of
from rows import RESULTS, TORCH, Key, Rows, code_label
from verdicts import FAULTS, STRATEGIES, describe, judge, run_once

KEYS = ("torch", "source", "fault", "strategy", "seed")
_KEPT = ("truth", "verdict", "match", "not_judged", "collectives", "thinned", "wall_seconds")


def run_all(keys: list[Key], rows: Rows) -> None:
    """Run the demos that are not known yet."""
    for key in rows.missing(keys):
        _, source, fault, strategy, seed = key
        with tempfile.TemporaryDirectory(prefix="rankscope-bare-") as empty:
            answer = run_once(fault, strategy, seed, environment_of(source, Path(empty)))
        values = {name: answer[name] for name in _KEPT}
        values["verdict"] = answer["verdict"] and {
            name: answer["verdict"][name] for name in ("kind", "ranks", "onset_step", "what")
        }
        values["judgement"] = _judgement(answer)
        rows.add(key, values)
        print(f"{answer['collectives']:<9}{describe(answer, values['judgement'])}", flush=True)


def _judgement(answer: dict[str, Any]) -> str:
    return f"not judged: {answer['not_judged']}" if answer["not_judged"] else judge(answer)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table by version of PyTorch, source and fault."""
    lines = [
        "| PyTorch | source | fault | recorded by | right | seconds, median and most |",
        "|" + "---|" * 6,
    ]
    cells_of: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: [int(part) for part in row["torch"].split(".")]):
        cells_of.setdefault((row["torch"], row["source"], row["fault"]), []).append(row)
    for (torch, source, fault), mine in cells_of.items():
        seconds = sorted(row["wall_seconds"] for row in mine)
        cells = (
            torch, source, fault, ", ".join(sorted({row["collectives"] for row in mine})),
            f"{sum(row['judgement'] == 'right' for row in mine)} of {len(mine)}",
            f"{seconds[len(seconds) // 2]:.0f}, {seconds[-1]:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each demo that was not right."""
    return [
        f"- {', '.join(str(row[key]) for key in KEYS)}: {row['judgement']}"
        for row in rows
        if row["judgement"] != "right"
    ]


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default=BARE, choices=SOURCES)
    parser.add_argument("--faults", default=",".join(FAULTS), help="with commas between")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="likewise")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--label", default=code_label(), help="of the code (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "bare_demo.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    keys: list[Key] = [
        (TORCH, chosen.source, fault, strategy, seed)
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        for fault in chosen.faults.split(",")
        for strategy in chosen.strategies.split(",")
    ]
    if not chosen.table:
        run_all(keys, rows)
    mine = [row for row in rows.all() if row["torch"] == TORCH]
    print("\n".join(table(mine)))
    wrong = misses(mine)
    print("\n".join(wrong))
    return 0 if mine and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
