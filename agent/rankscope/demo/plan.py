"""What a demo does: the fault, its rank and step, and the trainer's command line for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

FAULTS: tuple[str, ...] = ("slow_compute", "slow_data", "hang", "crash")
STRATEGIES: tuple[str, ...] = ("ddp", "pipeline")
# A slow rank is named after 15 s and 20 recorded steps; the latest step to begin is reached after
# 5 to 15 s, and where recording is thinned fewer than half of the steps may be recorded.
LEAST_SECONDS = 40.0
# Extra time of the slow rank as a multiple of its own step. A pipeline hides part of a delay,
# on a busy machine perhaps all of one that is as long as the stage's self time.
_SIZES = {("slow_compute", "pipeline"): 2.0, ("slow_data", "pipeline"): 2.0}
_EARLIEST_STEP, _LATEST_STEP = 60, 140
_STEPS_AFTER = 120  # on a slow machine; with LEAST_SECONDS on a fast one


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does: `fault` is one of FAULTS or None for a clean run.

    `steps` are the least: the run is as long as LEAST_SECONDS on any machine.
    """

    fault: str | None
    rank: int
    start_step: int
    ranks: int
    strategy: str
    steps: int

    def trainer_arguments(self, manifest: Path) -> list[str]:
        """Return the trainer's command line for this plan."""
        arguments = ["--strategy", self.strategy, "--steps", str(self.steps)]
        arguments += ["--least-seconds", str(LEAST_SECONDS)]
        if self.strategy == "ddp":  # as most models have buffers, for which a forward waits
            arguments.append("--mask-buffer")
        if self.fault is not None:
            fault = f"{self.fault}:rank={self.rank},start={self.start_step}"
            if size := _SIZES.get((self.fault, self.strategy)):
                fault += f",size={size}"
            arguments += ["--fault", fault, "--fault-manifest", str(manifest)]
        return arguments


def draw(fault: str, ranks: int, strategy: str, seed: int | None) -> DemoPlan:
    """Draw rank and step at random, the fault too where it is "random"."""
    chance = random.Random(seed)
    chosen: str | None = chance.choice(FAULTS) if fault == "random" else fault
    rank, start_step = chance.randrange(ranks), chance.randint(_EARLIEST_STEP, _LATEST_STEP)
    return DemoPlan(
        fault=None if chosen == "none" else chosen,
        rank=rank,
        start_step=start_step,
        ranks=ranks,
        strategy=strategy,
        steps=start_step + _STEPS_AFTER,
    )
