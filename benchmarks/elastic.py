"""Kill ranks of an elastic run: does it finish, with the losses of an undisturbed one?

    python benchmarks/elastic.py --kills 10
    python benchmarks/elastic.py --kills 3 --ranks 4 --seed 7

Each kill is a SIGKILL to a random rank. torchrun starts all ranks again, and they go on from the
last checkpoint. Exit status 1 if a step is missing, if its loss differs in a single bit, or if
more steps are trained again than lie between two checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.scenarios import elastic


def main() -> int:
    elastic.WAIT_SECONDS = 3600.0  # for the whole run
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdict, output = elastic.kill_ranks(
            Path(folder), kills=chosen.kills, ranks=chosen.ranks, seed=chosen.seed
        )
    print(json.dumps({**dataclasses.asdict(verdict), "passed": verdict.passed}, indent=1))
    if not verdict.passed:
        print(output, file=sys.stderr)
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
