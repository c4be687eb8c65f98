"""Is every fault of the reference trainer found with every source of collectives?

    python benchmarks/sources.py [--sources probe,kernels] [--seeds 3] [--faults NAME,...]
    python benchmarks/sources.py --table

The runs of `real_ranks.py`, each with a source by force: `probe`, `official`, `kernels`, or `bare`,
which forces nothing and takes away the compiler and all that was left from before. Goes on where it
was stopped; results are in benchmarks/results/sources.jsonl. A source that this machine or this
PyTorch does not have is left out and named. Exit code 1 if less than 97 % of the runs of a source
are right, or a healthy rank is accused.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forced import SOURCES, available, forced_run
from real_ranks import CASES, Case, plan
from rows import Key, Rows, parser_of

from tests.score.card import share
from tests.score.real import ACCUSES, FALSE_ALARM, NOT_FIRED, OTHER, RIGHT, SILENT, record_of

KEYS = ("source", "fault", "strategy", "seed")
RIGHT_SHARE = 0.97
LEAST_SECONDS = 40.0  # as the demo: where steps are thinned, time is what makes up for them


def wanted_runs(chosen: argparse.Namespace) -> dict[Key, Case]:
    """Return the runs that were asked for by their keys, one source after the other."""
    names = [name for name in chosen.faults.split(",") if name]
    cases = [
        (_as_long(shown, chosen.least_seconds), seed)
        for case, seed in plan(chosen.seeds, chosen.clean, names, chosen.first_seed)
        for shown in _with_strategies(case, chosen.strategies)
    ]
    return {
        (source, case.fault, case.strategy, seed): case
        for source in available(chosen.sources.split(","))
        for case, seed in cases
    }


def _with_strategies(case: Case, strategies: str) -> list[Case]:
    """Return a case once for each strategy, as it is where it has one of its own."""
    if not strategies or case.strategy != Case(case.fault).strategy or case not in CASES:
        return [case]
    return [dataclasses.replace(case, strategy=one) for one in strategies.split(",")]


def _as_long(case: Case, seconds: float) -> Case:
    return dataclasses.replace(case, flags=(*case.flags, "--least-seconds", str(seconds)))


def run_all(runs: dict[Key, Case], rows: Rows, jobs: int) -> None:
    """Run what is not known yet."""

    def one(key: Key) -> None:
        source, case, seed = key[0], runs[key], key[3]
        with forced_run(source, case, seed, {}) as run:
            values = {"used": run.recording.source, "thinned": run.recording.thinned}
            row = rows.add(key, values | record_of(run.outcome))
        print(f"{source:<10}{case.fault:<24}{case.strategy:<17}seed {seed:<3} "
              f"{row['used']:<9}{row['wall_seconds']:>4.0f} s  {row['judgement']}", flush=True
        )  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, rows.missing(runs)))


def table(rows: Iterable[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the table by source, and whether every source is good enough."""
    lines = [
        "| source | recorded by | runs | right | said nothing | other kind | healthy accused | "
        "did not fire |",
        "|" + "---|" * 8,
    ]
    is_good = True
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    for source, mine in by_source.items():
        count = {word: sum(row["judgement"].startswith(word) for row in mine)
                 for word in (RIGHT, SILENT, OTHER, ACCUSES, FALSE_ALARM, NOT_FIRED)}  # fmt: skip
        fired, accused = len(mine) - count[NOT_FIRED], count[ACCUSES] + count[FALSE_ALARM]
        is_good &= not accused and count[RIGHT] >= RIGHT_SHARE * fired > 0
        used = ", ".join(sorted({_recorded_by(row["used"]) for row in mine}))
        cells = (source, used, len(mine), share(count[RIGHT], fired), count[SILENT], count[OTHER],
                 accused, count[NOT_FIRED])  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines, is_good and bool(by_source)


def _recorded_by(used: str) -> str:
    """Return what recorded a run; some end before they import what a source needs."""
    return "none yet" if used.startswith("waits for") else used or "not registered"


def misses(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return a list item for each run whose fault fired and that is not right."""
    return [
        f"- {row['source']}, {row['fault']}, {row['strategy']}, seed {row['seed']}: "
        f"{row['judgement']}"
        for row in rows
        if not row["judgement"].startswith((RIGHT, NOT_FIRED))
    ]


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = parser_of(
        __doc__, "sources.jsonl", sources=SOURCES, seeds=3, least_seconds=LEAST_SECONDS
    )
    parser.add_argument("--faults", default="", help="only these, with commas between")
    parser.add_argument(
        "--strategies", default="", help="also with these, where a fault needs none of its own"
    )
    parser.add_argument("--clean", type=int, default=11, help="runs without a fault, of a source")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    if not chosen.table:
        run_all(wanted_runs(chosen), rows, chosen.jobs)
    lines, is_good = table(rows.all())
    print("\n".join(lines))
    print("\n".join(misses(rows.all())))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
