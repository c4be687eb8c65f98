"""Does the recorded waiting of a rank match how long it really waited, in third-party programs?

    python benchmarks/waits.py [--programs nanogpt,mingpt] [--sources probe,kernels]
    python benchmarks/waits.py --table

Programs of `tests/foreign/programs.py`, and those of `tests/waits/programs.py` as one. One rank is
slowed in its forward from 25 s on, so that others wait. The truth is a preloaded library
that knows nothing of the agent (`tests/waits/waits.c`): it writes down each sleep of the training
thread on a condition variable of C++. Right is a step of a rank whose recorded waiting differs from
that by no more than 2 % of the step, beside the time for which the thread had no processor though
it could run; what is not waiting is the rank's own, so that one is right as well. Resumes where it
was stopped; results are in benchmarks/results/waits.jsonl. Exit code 1 where less than 99 % of the
steps of a source are right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from forced import SOURCES, available, environment_of
from foreign import command_of, end, here
from rows import ROOT, Rows, parser_of

sys.path[:0] = [str(ROOT)]

from tests.agent import recorded  # noqa: E402
from tests.foreign import programs  # noqa: E402
from tests.foreign.programs import Program  # noqa: E402
from tests.waits import truth  # noqa: E402
from tests.waits.programs import PROGRAMS  # noqa: E402

KEYS = ("program", "source", "seed")
ENOUGH = 0.99
SECONDS, SLOW_AFTER_S = 40.0, 25.0
OURS = "every way to wait"  # the programs of `tests/waits`, one after the other
STEPS, SLOW_MS = 120, 40.0
NOT_HERE = ("in-a-thread", "ray-train")  # the library watches main threads


def run_program(
    program: Program, source: str, library: Path, folder: Path, seconds: float
) -> list[truth.Waits]:
    """Run a program for a while and return the steps of its ranks, without the first ones."""
    place, told = folder / "program", folder / "waits"
    place.mkdir()
    told.mkdir()
    words = program.prepare(place)
    inject = ROOT / "tests" / "foreign" / "inject"
    environ = recorded.environment(
        folder, RANKSCOPE_OVERHEAD_PERCENT="100", RANKSCOPE_STEP_SLOTS="65536",
        LD_PRELOAD=str(library), WAITS=str(told),
        PYTHONPATH=os.pathsep.join((str(recorded.SITE), str(inject))),
        FOREIGN_RANK="1", FOREIGN_AT=str(time.monotonic() + SLOW_AFTER_S), FOREIGN_PLACE="sleep",
        FOREIGN_S=str(max(program.step_ms, 10.0) / 1e3), **environment_of(source, folder),
    )  # fmt: skip
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command_of(program, words), cwd=place, env=environ, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    time.sleep(seconds)
    end(process)
    steps = [truth.of_steps(told, rank) for rank in recorded.read(folder)]
    return [one.only(np.arange(truth.WARM_UP, len(one.begun)), program.name) for one in steps]


def run_one(name: str, source: str, seconds: float) -> dict[str, Any]:
    """Run one program with one source and return how many of its steps are right."""
    with tempfile.TemporaryDirectory(prefix="rankscope-waits-") as scratch:
        folder = Path(scratch)
        library = truth.library(folder)
        if name == OURS:
            found = truth.run(
                folder, library, list(PROGRAMS), source=source, ranks=2, steps=STEPS,
                slow_ms=SLOW_MS,
            )  # fmt: skip
        else:
            found = run_program(programs.BY_NAME[name], source, library, folder, seconds)
        if not found:
            raise SystemExit((folder / "output").read_text(errors="replace")[-3000:])
    errors = np.abs(np.concatenate([one.errors for one in found]))
    took, waited, crowded = (
        float(sum(getattr(one, name).sum() for one in found))
        for name in ("duration", "truth", "crowded")
    )
    return {
        "steps": len(errors),
        "right": int((errors <= truth.WITHIN).sum()),
        "p99_error": round(float(np.quantile(errors, 0.99)), 4),
        "waited": round(waited / took, 3),
        "crowded": round(crowded / took, 3),
    }


def table(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return a row a program and source, the sum of each source, and whether all are right."""
    lines = [
        "| program | source | steps of ranks | within 2 % | 99th percentile of the error | "
        "waited | without a processor |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        share = row["right"] / row["steps"]
        lines.append(
            f"| {row['program']} | {row['source']} | {row['steps']:,} | {share:.1%} | "
            f"{row['p99_error']:.1%} | {row['waited']:.0%} | {row['crowded']:.0%} |"
        )
    is_good = bool(rows)
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        steps, right = (sum(row[name] for row in mine) for name in ("steps", "right"))
        lines.append(f"| **all** | {source} | {steps:,} | {right / steps:.2%} | | | |")
        is_good &= right >= ENOUGH * steps
    return lines, is_good


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    names = [OURS, *(name for name in programs.BY_NAME if name not in NOT_HERE)]
    parser = parser_of(__doc__, "waits.jsonl", sources=SOURCES[::2], seeds=1, least_seconds=SECONDS)
    parser.add_argument("--programs", default=",".join(names), help="with commas between")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    wanted = chosen.programs.split(",")
    there = [OURS] * (OURS in wanted) + here([name for name in wanted if name != OURS])
    keys = [(name, source, 1) for name in there for source in available(chosen.sources.split(","))]
    for key in [] if chosen.table else rows.missing(keys):
        row = rows.add(key, run_one(key[0], key[1], chosen.least_seconds))
        print(f"{key[0]:<18}{key[1]:<9}{row['right']} of {row['steps']} right, error of the 99th "
              f"percentile {row['p99_error']:.1%}", flush=True)  # fmt: skip
    lines, is_good = table(rows.all())
    print("\n".join(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
