"""`rankscope demo` with ranks that sleep where others compute, so that several go on at once.

python light_demo.py demo [FLAGS ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rankscope.cli import main
from rankscope.demo.plan import DemoPlan

# Steps of 0.05 to 0.15 s, most of which they sleep.
LIGHT = ("--width", "32", "--context", "32", "--layer-seconds", "0.001")
_arguments_of = DemoPlan.trainer_arguments


def trainer_arguments(plan: DemoPlan, manifest: Path) -> list[str]:
    """Return the trainer's command line for a plan, with a model of almost no work."""
    return [*_arguments_of(plan, manifest), *LIGHT]


if __name__ == "__main__":
    DemoPlan.trainer_arguments = trainer_arguments  # type: ignore[method-assign]
    sys.exit(main())
