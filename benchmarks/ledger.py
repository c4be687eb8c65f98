"""Does the ledger of a job that is killed and goes on say where its time went?

    python benchmarks/ledger.py [--kills 2] [--ranks 2] [--steps-between 60] [--seed 1]

A real elastic job under `rankscope run`: each kill is a SIGKILL to a random rank, torchrun starts
all again, and they go on from the last checkpoint. The truth is the job's own account: torchrun's
begin and end by the kernel, each step of each rank by the trainer. Exit code 1 if the parts of the
ledger miss the wall time by more than 0.5 %, or its effective training time ratio (ETTR) is more
than a point of a hundred beside the truth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from rankscope_server.diagnose.goodput.ledger import KEPT  # noqa: E402
from tests.scenarios.accounts import MAX_ETTR_ERROR, MAX_SUM_ERROR, killed_job  # noqa: E402


def main() -> int:
    """Run the job, print both accounts, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps-between", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this directory")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = killed_job(
            chosen.keep or Path(scratch), kills=chosen.kills, ranks=chosen.ranks,
            steps_between=chosen.steps_between, seed=chosen.seed,
        )  # fmt: skip
    truth, book = found.truth, found.book
    print(f"ranks {found.kills} of {chosen.ranks} killed, {found.attempts} attempts")
    for part, seconds in book.parts.items():
        print(f"  {part:<28}{seconds:8.2f} s {100 * seconds / book.wall_seconds:6.2f} %")
    inside = (*KEPT, "lost work", "checkpoint")
    outside = sum(seconds for part, seconds in book.parts.items() if part not in inside)
    rows = (
        ("all parts, against the wall time", sum(book.parts.values()), truth.wall),
        ("lost work", book.parts["lost work"], truth.lost),
        ("checkpoint", book.parts["checkpoint"], truth.checkpoint),
        ("neither in steps nor in checkpoints", outside, truth.outside),
    )
    print(f"{'seconds of all ranks':<40}{'ledger':>9}{'truth':>9}")
    for name, said, true in rows:
        print(f"  {name:<38}{said:9.2f}{true:9.2f}  {100 * (said - true) / truth.wall:+.2f} %")
    print(f"  steps done again: {book.lost_steps}, truth {truth.lost_steps}")
    print(f"  ETTR {100 * book.ettr:.2f} %, truth {100 * truth.ettr:.2f} %")
    is_right = abs(found.sum_error) <= MAX_SUM_ERROR and abs(found.ettr_error) <= MAX_ETTR_ERROR
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
