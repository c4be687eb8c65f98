"""One rank of `benchmarks/bubble.py`: the trainer, and a clock on each forward and backward.

torchrun ... bubble_rank.py FOLDER JSON, where JSON holds the trainer's arguments for each run
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.model import GPT
from rankscope_trainer.strategies.model_parallel import ModelParallel
from rankscope_trainer.strategies.pipeline import Pipeline
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import join_world

# What a rank computes. The chunks of a pipeline stage do not wait: the schedule receives before.
COMPUTES: list[tuple[Any, str]] = [
    (_PipelineStageBase, "forward_one_chunk"),
    (_PipelineStageBase, "backward_one_chunk"),
    (_PipelineStageBase, "backward_weight_one_chunk"),
    (GPT, "forward"),
    (torch.Tensor, "backward"),
]


class Clock:
    """Adds up the time inside computations, step by step."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.busy: list[float] = []
        self._depth = 0

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self._depth -= 1
                if not self._depth and self.busy:  # one may call the other
                    self.busy[-1] += time.perf_counter() - started

        setattr(owner, name, watched)

    def watch_steps(self, strategy: Any) -> None:
        train_batch = strategy.train_batch

        def watched(*arguments: Any) -> Any:
            self.began.append(time.perf_counter())
            self.busy.append(0.0)
            return train_batch(*arguments)

        strategy.train_batch = watched

    def steps(self) -> list[tuple[float, float]]:
        """Return busy and whole seconds of each step since the last call."""
        ends = [*self.began[1:], time.perf_counter()]
        wholes = [end - start for start, end in zip(self.began, ends, strict=True)]
        found = list(zip(self.busy, wholes, strict=True))
        self.began.clear()
        self.busy.clear()
        return found


def main(folder: Path, runs: list[list[str]]) -> None:
    clock = Clock()
    for owner, name in COMPUTES:
        clock.watch(owner, name)
    for strategy in (Pipeline, ModelParallel):
        clock.watch_steps(strategy)
    torch.set_num_threads(1)
    world = join_world(device="cpu", timeout_seconds=600)
    measured = []
    for arguments in runs:
        Trainer(load_settings(arguments, {}, world.world_size), world).run()
        measured.append(clock.steps())
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
