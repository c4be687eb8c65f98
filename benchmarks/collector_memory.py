"""A day of a run in minutes: does the collector's memory stay flat?

    python benchmarks/collector_memory.py [--hours 24] [--attempts 24] [--json]

Real processes write the rings and journals of a run with steps of one second, 50 collectives a
step in 40 groups from 2,000 call sites and a log line a step, as fast as a collector can follow;
each attempt has new processes, groups and call sites. After each attempt the collector's memory
is read. Exit status 1 if it grows by more than 8 MiB after the second attempt, or passes 128 MiB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the processes are those of the tests

from tests.agent.collector.memory import follow

MAX_GROWTH_BYTES, MAX_BYTES = 8 << 20, 128 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--attempts", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps-per-second", type=float, default=300.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    choices = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankscope-memory-") as folder:
        memory = follow(
            Path(folder) / "run", choices.attempts, int(choices.hours * 3600 / choices.attempts),
            choices.ranks, choices.steps_per_second,
        )  # fmt: skip
    passed = memory.growth_bytes <= MAX_GROWTH_BYTES and max(memory.rss_bytes) <= MAX_BYTES
    figures = asdict(memory) | {
        "growth_bytes": memory.growth_bytes,
        "seconds": round(time.monotonic() - begun, 1),
        "passed": passed,
    }
    if choices.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):18} {value}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
