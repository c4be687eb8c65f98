"""Run the trainer and write down, for each step, what the operating system and Python say of it.

It shares nothing with the agent and decides nothing: times of forward, backward, data and
checkpoint, memory, collections, switches, clocks, environment. Usage as counted_trainer.py.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from rankscope_trainer.__main__ import main
from rankscope_trainer.checkpoint import Checkpoints
from rankscope_trainer.data import Batches, Sample
from rankscope_trainer.faults.fault import Place
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.model import GPT
from rankscope_trainer.strategies.ddp import DataParallel


class Recorder:
    """Sums by step, and what was so as the step began."""

    def __init__(self) -> None:
        self.step = 0
        self.sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.states: dict[int, dict[str, Any]] = {}
        self.drawn = torch.empty(0)
        self._since: dict[str, float] = {}
        self._clocks = time.time_ns() - time.monotonic_ns()

    def begin(self, what: str) -> None:
        self._since[what] = time.perf_counter()

    def finish(self, what: str) -> None:
        self.sums[self.step][what] += time.perf_counter() - self._since.pop(what)

    def install(self) -> None:
        self._install_steps()
        self._install_data()
        self._install_model()
        gc.callbacks.append(self._on_collection)

    def _install_steps(self) -> None:
        begin_step, fire, save = Injector.begin_step, Injector.fire, Checkpoints.save

        def noting_begin_step(injector: Injector, step: int) -> None:
            self.step = step
            begin_step(injector, step)
            self.states[step] = self._state()

        def noting_fire(injector: Injector, place: Place, **details: Any) -> Any:
            if place is Place.CHECKPOINT:
                self.begin("checkpoint")
            return fire(injector, place, **details)

        def timed_save(*arguments: Any, **keywords: Any) -> None:
            save(*arguments, **keywords)
            self.finish("checkpoint")
            self.sums[self.step]["checkpoints"] += 1

        Injector.fire = noting_fire  # type: ignore[method-assign,assignment]
        Injector.begin_step = noting_begin_step  # type: ignore[method-assign,assignment]
        Checkpoints.save = timed_save  # type: ignore[method-assign,assignment]

    def _install_data(self) -> None:
        original, recorder = Batches.__iter__, self

        def timed(batches: Batches) -> Iterator[Any]:
            inner = original(batches)
            while True:
                recorder.begin("data")
                batch = next(inner)
                recorder.finish("data")
                recorder.drawn = batch[0].clone()
                yield batch

        def comparing(strategy: DataParallel, batch: Sample) -> torch.Tensor:
            self.sums[self.step]["changed_bytes"] += int((batch[0] != self.drawn).sum())
            return train_batch(strategy, batch)

        train_batch = DataParallel.train_batch
        DataParallel.train_batch = comparing  # type: ignore[method-assign]
        Batches.__iter__ = timed  # type: ignore[method-assign]

    def _install_model(self) -> None:
        def before(module: Any, inputs: Any) -> None:
            if isinstance(module, GPT):
                self.begin("forward")

        def after(module: Any, inputs: Any, outputs: Any) -> None:
            if isinstance(module, GPT):
                self.finish("forward")
                self.sums[self.step]["forwards"] += 1
                self.sums[self.step]["layers"] = len(module.blocks)

        register_module_forward_pre_hook(before)
        register_module_forward_hook(after)
        backward = torch.autograd.backward

        def timed(*arguments: Any, **keywords: Any) -> None:
            self.begin("backward")
            backward(*arguments, **keywords)
            self.finish("backward")

        torch.autograd.backward = timed

    def _on_collection(self, phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            self.begin("collection")
        else:
            self.finish("collection")
            self.sums[self.step]["collected"] += information["collected"]

    def _state(self) -> dict[str, Any]:
        own = psutil.Process()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": time.monotonic(),
            "wall_minus_monotonic_ms": (time.time_ns() - time.monotonic_ns() - self._clocks) / 1e6,
            "rss_mib": own.memory_info().rss / 2**20,
            "switches": usage.ru_nivcsw,
            "cores": sorted(os.sched_getaffinity(0)),
            "children": [
                {
                    "cores": child.cpu_affinity(),
                    "cpu_seconds": child.cpu_times().user,
                    "rss_mib": child.memory_info().rss / 2**20,
                }
                for child in own.children()
            ],
            "filelock": importlib.metadata.version("filelock"),
            "NCCL_PROTO": os.environ.get("NCCL_PROTO"),
        }


if __name__ == "__main__":
    recorder = Recorder()
    recorder.install()
    code = main(sys.argv[2:])
    document = json.dumps({"sums": recorder.sums, "states": recorder.states})
    Path(sys.argv[1], f"record-{os.environ['RANK']}.json").write_text(document)
    raise SystemExit(code)
