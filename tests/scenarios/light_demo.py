"""`rankscope demo` with ranks that sleep where others compute, so that several go on at once.

python light_demo.py demo [FLAGS ...]

Where FORKED holds the command of a launcher as JSON, it starts the ranks in place of torchrun.
LEAST_SECONDS is how long they train at least, in place of the demo's own time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import rankscope_trainer
from rankscope.cli import main
from rankscope.demo import plan, processes
from rankscope.demo.plan import DemoPlan

# Steps of 0.05 to 0.15 s, most of which they sleep; a layer for each of four stages.
LIGHT = ("--layers", "4", "--width", "32", "--context", "32", "--layer-seconds", "0.002")
_TRAINER = Path(rankscope_trainer.__file__).with_name("__main__.py")
_arguments_of = DemoPlan.trainer_arguments


def trainer_arguments(chosen: DemoPlan, manifest: Path) -> list[str]:
    """Return the trainer's command line for a plan, with a model of almost no work."""
    return [*_arguments_of(chosen, manifest), *LIGHT]


if __name__ == "__main__":
    DemoPlan.trainer_arguments = trainer_arguments  # type: ignore[method-assign]
    if forked := os.environ.get("FORKED"):
        processes.launcher = lambda ranks: [*json.loads(forked), str(ranks), str(_TRAINER)]
    plan.LEAST_SECONDS = float(os.environ.get("LEAST_SECONDS", plan.LEAST_SECONDS))
    sys.exit(main())
