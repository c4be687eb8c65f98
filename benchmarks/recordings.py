"""What `rankscope explain` says of the open recordings, against what is known of them.

    python benchmarks/recordings.py                      # beside the checkout: shared/data
    python benchmarks/recordings.py --data FOLDER --json

Exits with 1 where a culprit is missed, a healthy rank is named, or S is off by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_DATA = Path(os.environ.get("RANKSCOPE_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
_RANKS = re.compile(r"^Fault ranks: \[([\d, ]+)\]", re.MULTILINE)
_S = re.compile(r"S = ([\d.]+): ([\d.]+) s a step, against ([\d.]+) s")
_WITHOUT = re.compile(r"step takes ([\d.]+) s, about ([\d.]+) s without it")
_SLOWEST = 0  # worker of the open trace, whose share of the slowdown is published as 1.00
_ALLOWED = 0.01


def main() -> int:
    """Print one row for each recording. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=_DATA)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = sorted((arguments.data / "flight_recorder").glob("*/fault_injection.log"))
    trace = arguments.data / "traces" / "trace-AR.parquet"
    if not cases and not trace.exists():
        sys.stderr.write(f"no recordings in {arguments.data}: name their folder with --data\n")
        return 2
    rows = [_of_dumps(log) for log in cases] + [_of_trace(trace)] * trace.exists()
    for row in rows:
        print(json.dumps(row) if arguments.json else _line(row))
    return 0 if all(row["is_right"] for row in rows) else 1


def explain(path: Path) -> tuple[dict[str, Any], float]:
    """Return the answer on one recording, and the seconds that it took."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "explain", "--json", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), time.perf_counter() - began


def _of_dumps(log: Path) -> dict[str, Any]:
    found = _RANKS.search(log.read_text())
    truth = [int(one) for one in found[1].split(",")] if found else []
    return _row(log.parent, truth)


def _of_trace(trace: Path) -> dict[str, Any]:
    row = _row(trace, [_SLOWEST])
    published = json.loads((trace.parent / "result-AR.json").read_text())["blocking_slowdown"]
    shown, without = _S.search(row["cause"]), _WITHOUT.search(row["cause"])
    row["S"], row["S_published"] = float(shown[1]) if shown else None, published
    row["step_s"], row["step_without_s"] = map(float, without.groups()) if without else (None, None)
    is_near = shown is not None and abs(float(shown[1]) / published - 1) <= _ALLOWED
    row["is_right"] = row["is_right"] and is_near and without is not None
    return row


def _row(path: Path, truth: list[int]) -> dict[str, Any]:
    answer, seconds = explain(path)
    root = answer["root"] or {"ranks": [], "cause": answer["recorded"]["text"], "cost": None}
    named = {rank for one in answer["findings"] for rank in one["ranks"]}
    return {
        "recording": path.name, "truth": truth, "named": root["ranks"], "cost": root["cost"],
        "cause": root["cause"], "seconds": round(seconds, 1),
        "is_right": root["ranks"] == truth and named <= set(truth),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    text = (
        f"{'right' if row['is_right'] else 'WRONG'}  {row['recording']}: named {row['named']}, "
        f"known {row['truth']}; cost {row['cost']}; {row['seconds']} s"
    )
    if "S" in row:
        text += (
            f"\n       S {row['S']}, published {row['S_published']:.3f}; step {row['step_s']} s, "
            f"{row['step_without_s']} s without the rank"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
