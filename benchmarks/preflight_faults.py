"""Every fault of the preflight laboratory: what plain torchrun does, what preflight says.

python benchmarks/preflight_faults.py --torchrun [NAME[:MODE] ...]   hours; 12 launches at once
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.preflight.faults import BY_NAME

ROOT = Path(__file__).parents[1]
TORCHRUN = ROOT / "benchmarks" / "results" / "preflight_torchrun.jsonl"
NUM_AT_ONCE = 12  # a launch waits far more than it computes; 0.7 GB each
STAGGER_S = 6.0  # importing torch six times is what computes
_writing = threading.Lock()


def load(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file, oldest first; none if it is absent."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure_torchrun(wanted: list[str]) -> int:
    """Launch torchrun under every wanted fault; what is in the result file is not run again."""
    known = {(row["fault"], row["mode"]) for row in load(TORCHRUN)}
    launches = [pair for pair in _pairs(wanted) if pair not in known]
    print(f"{len(launches)} launches, {len(known)} known", flush=True)
    gate = threading.Lock()

    def one(pair: tuple[str, str]) -> bool:
        with gate:
            time.sleep(STAGGER_S)
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "preflight_launch.py"), *pair],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(f"{':'.join(pair)} failed: {done.stderr[-2000:]}", flush=True)
            return False
        with _writing, TORCHRUN.open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
        print(f"{time.strftime('%H:%M:%S')} {':'.join(pair)}", flush=True)
        return True

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        results = list(pool.map(one, launches))
    return 0 if all(results) else 1


def _pairs(wanted: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in wanted or list(BY_NAME):
        name, _, mode = text.partition(":")
        pairs += [(name, one) for one in ((mode,) if mode else BY_NAME[name].modes)]
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchrun", nargs="*", metavar="NAME[:MODE]")
    chosen = parser.parse_args()
    os.nice(10)
    if chosen.torchrun is not None:
        return measure_torchrun(chosen.torchrun)
    parser.error("say what to do")


if __name__ == "__main__":
    raise SystemExit(main())
