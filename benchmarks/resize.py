"""Change the number of ranks again and again: are the losses those of an undisturbed run?

    python benchmarks/resize.py
    python benchmarks/resize.py --changes 5 --strategies fsdp --seed 7

Each change is a restart with another number of ranks, drawn at random, from the newest checkpoint.
Compared is each loss that the first rank reports with that of the same windows in one process
without a restart; and the windows drawn with those of so many steps. Exit status 1 where a step is
missing, a window is lost or drawn twice, or a loss differs by more than rounding (2e-5).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope_trainer.checkpoint_folder import finished
from rankscope_trainer.command_line import load_settings
from tests.trainer.whole_runs import losses_of_windows, run_in_turns

BATCH, WORKERS, STEPS = 12, 2, 2
FLAGS = {
    "ddp": f"--batch-size 2 --global-batch {BATCH}",
    "fsdp": f"--batch-size 2 --global-batch {BATCH}",
    "ring": f"--batch-size 2 --global-batch {BATCH}",
    "tensor": "--batch-size 2 --microbatches 6",
    "pipeline": "--schedule gpipe --batch-size 2 --microbatches 6",
    "parameter_server": "--batch-size 3 --microbatches 2",
}
RANKS = {"tensor": (1, 2, 4), "parameter_server": (WORKERS + 1, WORKERS + 2)}  # else 1 to 3
SHARDS = {"tensor": 1, "pipeline": 1, "parameter_server": WORKERS}  # else one for each rank
_ROUNDING = 2e-5


def change(strategy: str, sizes: list[int], folder: Path) -> tuple[float, int]:
    """Train; return the largest relative difference of a loss, and the windows drawn."""
    servers = [f"--servers {size - WORKERS}" for size in sizes]
    is_served = strategy == "parameter_server"
    flags = f"--strategy {strategy} {FLAGS[strategy]}"
    runs = run_in_turns(folder, flags, sizes, STEPS, servers if is_served else ())
    settings = load_settings(runs[-1].arguments, {}, sizes[-1])
    expected, found = losses_of_windows(settings, BATCH), runs[-1].losses()
    if found.keys() != expected.keys():
        raise SystemExit(f"{strategy}: steps {sorted(expected.keys() - found.keys())} are missing")
    worst = 0.0
    for step, loss in found.items():
        ranks = sizes[(step - 1) // STEPS]
        own = expected[step][:: SHARDS.get(strategy, ranks)]  # windows are dealt out like cards
        right = sum(own) / len(own)
        worst = max(worst, abs(loss - right) / right)
    document = (finished(folder / "checkpoints")[-1] / "checkpoint.json").read_text()
    return worst, int(json.loads(document)["position"])


def main() -> int:
    """Change each strategy's number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--strategies", default=",".join(FLAGS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.stdout.write("| strategy | ranks | steps | windows | largest difference of a loss |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    is_right = True
    for strategy in options.strategies.split(","):
        chooser = random.Random(options.seed)
        possible = set(RANKS.get(strategy, (1, 2, 3)))
        sizes = [min(possible)]
        for _ in range(options.changes):
            sizes.append(chooser.choice(sorted(possible - {sizes[-1]})))
        with tempfile.TemporaryDirectory() as folder:
            worst, drawn = change(strategy, sizes, Path(folder))
        steps = STEPS * len(sizes)
        is_right &= worst <= _ROUNDING and drawn == BATCH * steps
        ranks = " ".join(map(str, sizes))
        row = f"| `{strategy}` | {ranks} | {steps} | {drawn} of {BATCH * steps} | {worst:.1e} |\n"
        sys.stdout.write(row)
        sys.stdout.flush()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
