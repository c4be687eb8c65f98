"""Kill the node collector every second for a minute, then take the server away for five minutes.

    python benchmarks/kill_collector.py                       # the full form: about seven minutes
    python benchmarks/kill_collector.py --kills 20 --outage 10 --json
    python benchmarks/kill_collector.py --spool-bytes 200000  # a spool too small for the outage

Four processes write real rings and journals: collectives in three groups, steps and log lines. A
real collector follows them and a real server stores what it sends. Afterwards every (rank, group,
sequence), every step and every log line in the server is compared with what the processes wrote.
Exit status 1 if anything is missing that was not counted as lost, or if anything is there twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the processes are those of the tests

from tests.agent.collector.killing import Killing, Plan, Result


def passed(result: Result) -> bool:
    """Return whether all that is missing was counted, and nothing is there twice."""
    missing = sum(result.missing.values())
    wrong = [*result.twice.values(), *result.not_written.values()]
    return missing <= sum(result.losses.values()) and not any(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--outage", type=float, default=300.0, help="seconds without the server")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=100.0, help="collectives a second and rank")
    parser.add_argument("--spool-bytes", type=int, default=256 << 20)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    choices = parser.parse_args()
    plan = Plan(
        ranks=choices.ranks, collectives_per_second=choices.rate, kills=choices.kills,
        kill_every_seconds=choices.every, outage_seconds=choices.outage,
        spool_bytes=choices.spool_bytes,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rankscope-kill-") as folder:
        result = Killing(plan, Path(folder)).carry_out()
    if choices.json:
        print(json.dumps(asdict(result) | {"passed": passed(result)}))
        return 0 if passed(result) else 1
    for name, value in asdict(result).items():
        words = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(
            value, dict
        ) else f"{value:.1f}" if isinstance(value, float) else str(value)  # fmt: skip
        print(f"{name.replace('_', ' '):20} {words or 'none'}")
    print("passed" if passed(result) else "FAILED")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
