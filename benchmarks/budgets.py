"""What a budget for recording does: to the verdicts, to what is recorded, and whether it is kept.

    python benchmarks/budgets.py [--budgets 0.05,0.5] [--sources probe,kernels] [--seeds 5]
    python benchmarks/budgets.py --table

Four ranks under RANKSCOPE_OVERHEAD_PERCENT, with each source by force and each of five faults.
Goes on where it was stopped; a line for each run is in benchmarks/results/budgets.jsonl. What
recording costs is read from the rings of the ranks when they are gone: the CPU of the calls that
were measured, of whole steps and of thinned ones, times the calls of all steps from 30 s on, and
what a call costs outside our code. Steps without kernels at the dispatcher cost what it took to
take them out and put them in again. Exit code 1 if a healthy rank is accused, a hang or a crash is
not named, a slow rank is not named within 60 s at 0.1 % or more, the budget is not kept, or ranks
recorded different steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forced import ForcedRun, available, forced_run
from numpy.typing import NDArray
from real_ranks import Case
from rows import Key, Rows, parser_of

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING, STEPS_RING, rank_directories
from rankscope.rank.hooks.collectives import SOURCES
from rankscope.wire import schema
from tests.score.real import ACCUSES, FALSE_ALARM, NO_FAULT, NOT_FIRED, RIGHT, record_of

KEYS = ("budget_percent", "source", "fault", "seed")
FAULTS = ("slow_compute", "slow_data", "hang", "crash", NO_FAULT)
ENDS = ("hang", "crash")
OUTSIDE_US = {source.name: source.outside_us for source in SOURCES}
NAMED_SECONDS = 60.0
NAMED_FROM_PERCENT = 0.1
# The latest fault begins after 20 s on 2 cores, and a minute is given to name it.
LEAST_SECONDS = 85.0
# Start-up does not count, and a level is asked for after 8 s and agreed in up to 8 s, twice.
SETTLED_SECONDS = 30.0
MIN_STEPS = 20  # fewer say nothing of what recording costs


@dataclass(frozen=True)
class RankRecord:
    """What the rings of one rank hold: a row per step, and the CPU of measured calls, in us."""

    steps: NDArray[Any]
    whole_us: float
    thinned_us: float  # nan: no call of a thinned step was measured
    switch_us: float  # of taking kernels out for thinned steps, or of putting them in, each time
    level: int

    @property
    def thinned(self) -> NDArray[np.bool_]:
        """Which of the steps were thinned."""
        flags: NDArray[np.bool_] = (self.steps["flags"] & schema.STEP_THINNED) != 0
        return flags

    @property
    def outside(self) -> NDArray[np.bool_]:
        """Which of the steps had no kernels at the dispatcher."""
        flags: NDArray[np.bool_] = (self.steps["flags"] & schema.STEP_WAITS_UNKNOWN) != 0
        return flags

    def overhead_percent(self, outside_us: float) -> float | None:
        """Return which share of the time recording took once settled, None for a few steps."""
        began = self.steps["started_ns"].astype(np.int64)
        late = began - began.min(initial=began.max(initial=0)) >= SETTLED_SECONDS * 1e9
        if late.sum() < MIN_STEPS:
            return None
        rows = self.steps[late]
        each_us = np.where(self.thinned[late], self.thinned_us, self.whole_us) + outside_us
        each_us = np.where(self.outside[late], 0.0, each_us)
        switches_us = np.count_nonzero(np.diff(self.outside[late])) * self.switch_us
        passed_us = (int(rows["ended_ns"][-1]) - int(rows["started_ns"][0])) / 1e3
        took_us = float(np.nansum(rows["num_collectives"] * each_us)) + np.nan_to_num(switches_us)
        return 100 * float(took_us) / passed_us


def read_ranks(run_directory: Path) -> dict[int, RankRecord]:
    """Return the record of each rank of a run that is over."""
    found = {}
    for name in rank_directories(run_directory, latest_only=False):
        steps = ring.RingReader(run_directory / name / STEPS_RING, ring.STEP_FIELDS)
        calls = ring.RingReader(run_directory / name / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
        head = steps.u64(ring.HEAD_AT)
        rows, state = steps.read(np.arange(max(0, head - steps.num_slots), head))
        found[steps.rank] = RankRecord(
            steps=rows[state == 1],
            whole_us=_mean_us(calls, ring.OWN_NS_AT),
            thinned_us=_mean_us(calls, ring.OWN_THINNED_NS_AT),
            switch_us=_mean_us(calls, ring.OWN_SWITCH_NS_AT),
            level=calls.u8(ring.THINNING_AT),
        )
    return found


def _mean_us(calls: ring.RingReader, at: int) -> float:
    number = calls.u64(at + ring.U64.size)
    return calls.u64(at) / number / 1e3 if number else float("nan")


def num_different_steps(ranks: Sequence[RankRecord]) -> int:
    """Return how many steps were recorded whole on some ranks and thinned on others."""
    thinned = [
        dict(zip(rank.steps["step"].tolist(), rank.thinned.tolist(), strict=True)) for rank in ranks
    ]
    common = set.intersection(*(set(one) for one in thinned)) if thinned else set()
    return sum(len({one[step] for one in thinned}) > 1 for step in common)


def measured(run: ForcedRun, source: str) -> dict[str, Any]:
    """Return what the ranks' own records say of thinning and of its cost."""
    ranks = list(read_ranks(run.run_directory).values())
    outside_us = OUTSIDE_US.get(run.recording.source, OUTSIDE_US.get(source, 0.0))
    shares = [rank.overhead_percent(outside_us) for rank in ranks]
    return {
        "used": run.recording.source,
        "levels": sorted({rank.level for rank in ranks}),
        "overhead_percent": [None if share is None else round(share, 4) for share in shares],
        "us_per_collective": [round(rank.whole_us, 1) for rank in ranks],
        "different_steps": num_different_steps(ranks),
        "num_recorded": [int((~rank.thinned).sum()) for rank in ranks],
        "num_steps": [len(rank.steps) for rank in ranks],
    }


def faulty(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run."""
    wrong, judgement, named = [], row["judgement"], row["named_after_seconds"]
    if judgement.startswith((ACCUSES, FALSE_ALARM)):
        wrong.append(judgement)
    must_name = row["fault"] in ENDS or row["budget_percent"] >= NAMED_FROM_PERCENT
    if row["fault"] != NO_FAULT and must_name and judgement != NOT_FIRED:
        if judgement != RIGHT:
            wrong.append(judgement)
        elif named is None or named > NAMED_SECONDS:
            wrong.append(f"named after {named} s")
    above = [one for one in row["overhead_percent"] if one and one > row["budget_percent"]]
    if above:
        wrong.append(f"takes {max(above):.2g} %")
    if row["different_steps"]:
        wrong.append(f"{row['different_steps']} steps were not recorded alike")
    return list(dict.fromkeys(wrong))


def wanted_runs(chosen: argparse.Namespace) -> list[Key]:
    """Return the runs that were asked for, all of a seed before the next."""
    sources = available(chosen.sources.split(","))
    return [
        (float(budget), source, fault, seed)
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        for budget in chosen.budgets.split(",")
        for source in sources
        for fault in chosen.faults.split(",")
    ]


def run_all(keys: list[Key], rows: Rows, chosen: argparse.Namespace) -> None:
    """Run what is not known yet."""
    flags = ("--least-seconds", str(chosen.least_seconds))

    def one(key: Key) -> None:
        budget, source, fault, seed = key
        forced = {"RANKSCOPE_OVERHEAD_PERCENT": str(budget)}
        with forced_run(source, Case(fault, flags=flags), seed, forced) as run:
            row = rows.add(key, record_of(run.outcome) | measured(run, source))
        print(f"{budget:<6}{source:<10}{fault:<14}seed {seed:<3}levels {row['levels']} "
              f"{_most(row['overhead_percent'])} % of {budget} %  {row['wall_seconds']:.0f} s  "
              f"{'; '.join(faulty(row)) or 'right'}", flush=True)  # fmt: skip

    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(one, rows.missing(keys)))


def _most(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.3g}" if known else "-"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table by budget and source."""
    lines = [
        "| budget, % | source | runs | healthy accused | hang and crash named | slow rank named "
        "within 60 s | levels | most overhead, % | over budget | not recorded alike |",
        "|" + "---|" * 10,
    ]
    for budget, source in dict.fromkeys((row["budget_percent"], row["source"]) for row in rows):
        mine = [row for row in rows if (row["budget_percent"], row["source"]) == (budget, source)]
        fired = [row for row in mine if row["judgement"] != NOT_FIRED]
        ends = [row for row in fired if row["fault"] in ENDS]
        slow = [row for row in fired if row["fault"] not in (*ENDS, NO_FAULT)]
        shares = [max((one or 0 for one in row["overhead_percent"]), default=0) for row in mine]
        cells = (
            budget, source, len(mine),
            sum(row["judgement"].startswith((ACCUSES, FALSE_ALARM)) for row in mine),
            f"{sum(row['judgement'] == RIGHT for row in ends)} of {len(ends)}",
            f"{sum(_is_in_time(row) for row in slow)} of {len(slow)}",
            ", ".join(map(str, sorted({level for row in mine for level in row["levels"]}))),
            f"{max(shares):.3g}", sum(share > budget for share in shares),
            sum(row["different_steps"] > 0 for row in mine),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _is_in_time(row: dict[str, Any]) -> bool:
    named = row["named_after_seconds"]
    return row["judgement"] == RIGHT and named is not None and named <= NAMED_SECONDS


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = parser_of(
        __doc__, "budgets.jsonl", sources=OUTSIDE_US, seeds=5, least_seconds=LEAST_SECONDS
    )
    parser.add_argument("--budgets", default="0.05,0.1,0.5,2", help="percent, with commas between")
    parser.add_argument("--faults", default=",".join(FAULTS), help="likewise")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    if not chosen.table:
        run_all(wanted_runs(chosen), rows, chosen)
    print("\n".join(table(rows.all())))
    wrong = [(row, faulty(row)) for row in rows.all()]
    for row, reasons in wrong:
        if reasons:
            print(*(row[key] for key in KEYS), "; ".join(reasons))
    return 1 if not wrong or any(reasons for _, reasons in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
