"""Ways of dying x seeds: is the last record of each right?

    python benchmarks/torture.py [--seeds 5] [--ways sigkill,abort] [--at-once 2] [--json]

Real ranks on gloo, a real collector; victim, step and place within the step are drawn from the
seed. Exit code 1 if anything that was delivered is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the harness of the tests

from tests.scenarios.torture.harness import Case, Torture, memory_cgroup_root  # noqa: E402
from tests.scenarios.torture.ways import WAYS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--ways", default="", help="names, comma separated; default: all")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.ways.split(",") if arguments.ways else [way.name for way in WAYS]
    ways = [way for way in WAYS if way.name in names]
    skipped = []
    if memory_cgroup_root() is None:
        skipped = [way.name for way in ways if way.name == "oom-killer"]
        ways = [way for way in ways if way.name not in skipped]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    cases = [
        Case(way, seed, attempt)
        for attempt, (seed, way) in enumerate((seed, way) for seed in seeds for way in ways)
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        torture = Torture(Path(directory))
        with ThreadPoolExecutor(arguments.at_once) as pool:
            wrong = [line for problems in pool.map(torture.run, cases) for line in problems]
        torture.close()
    result = {
        "ways": len(ways), "seeds": len(seeds), "cases": len(cases), "skipped": skipped,
        "wrong": wrong, "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(wrong))
        print(
            f"{len(ways)} ways x {len(seeds)} seeds = {len(cases)} deaths in "
            f"{result['seconds']} s; {len(wrong)} facts wrong; skipped: {skipped or 'none'}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
