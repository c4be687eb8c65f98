"""What each compression of DDP's gradients sends in a step, and what it does to the loss.

    python benchmarks/compression.py
    python benchmarks/compression.py --ranks 2 --steps 50 --hooks none,fp8

Each hook trains the same model on the same data. Bytes are those that a rank hands to collectives
in the last step, counted where they reach the process group, with what a ring makes of them:
2 (N - 1) / N of an all_reduce, (N - 1) / N of an all_to_all, N - 1 of a part that is gathered.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.trainer.launch import launched

HOOKS = ("none", "bf16", "fp16", "fp8", "powersgd")
_EARLY = 10


def sent_bytes(operations: list[tuple[str, int]], ranks: int) -> float:
    """Return what a rank sends in a step, where each collective takes the fewest bytes."""
    factors = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_to_all_single": (ranks - 1) / ranks,
        "all_gather": ranks - 1,
    }
    return sum(factors[operation] * size for operation, size in operations)


def main() -> None:
    """Train with each hook, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hooks", default=",".join(HOOKS))
    options = parser.parse_args()
    last = options.steps
    sys.stdout.write(f"| hook | KiB sent | loss after {_EARLY} | after {last} | against none |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    plain = None
    for hook in options.hooks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--steps", str(last), "--comm-hook", hook, "--log-every", "1000000"]
            finished = launched(Path(folder) / hook, options.ranks, *arguments)
            if finished.code:
                raise SystemExit(finished.output)
            losses = finished.losses()
            kib = sent_bytes(finished.operations(0)[last], options.ranks) / 1024
        tail = [losses[step] for step in range(max(1, last - _EARLY + 1), last + 1)]
        mean = sum(tail) / len(tail)
        plain = mean if plain is None else plain
        cells = f"{kib:.0f} | {losses[_EARLY]:.4f} | {mean:.4f} | {mean / plain - 1:+.2%}"
        sys.stdout.write(f"| `{hook}` | {cells} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
