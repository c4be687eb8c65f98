"""Run the trainer and write down its weights after each step, and what it brings to collectives.

For the faults: a kernel at BackendSelect sees kind and size of the tensors as they really go to
the process group; a digest of each parameter shows whether the ranks' replicas are equal.
Usage: torchrun ... watched_trainer.py FOLDER ARGUMENTS
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankscope_trainer.__main__ import main
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.strategies.strategy import Strategy
from rankscope_trainer.train import Trainer

OPERATORS = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}


class Watcher:
    """Writes one JSON line for each call and each step, at once: the process may be killed."""

    def __init__(self, path: Path) -> None:
        self.step = 0
        self._file = path.open("w", buffering=1)
        self._library = torch.library.Library("c10d", "IMPL")

    def install(self) -> None:
        for operator, operation in OPERATORS.items():
            kernel = self._kernel(operator, operation)
            self._library.impl(operator, kernel, "BackendSelect", with_keyset=True)
        begin_step, after = Injector.begin_step, Trainer._after

        def noting_begin_step(injector: Injector, step: int) -> None:
            self.step = step
            begin_step(injector, step)

        def noting_after(trainer: Trainer, step: int) -> None:
            self.write(step=step, digest=digest(trainer.strategy))
            after(trainer, step)

        Injector.begin_step = noting_begin_step  # type: ignore[method-assign]
        Trainer._after = noting_after  # type: ignore[method-assign]

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def _kernel(self, operator: str, operation: str) -> Callable[..., Any]:
        redispatch = getattr(torch.ops.c10d, operator).default.redispatch

        def kernel(keyset: Any, tensors: list[torch.Tensor], *arguments: Any) -> Any:
            kind = str(tensors[0].dtype).removeprefix("torch.")
            elements = sum(part.numel() for part in tensors)
            self.write(step=self.step, call=(operation, kind, elements))
            return redispatch(
                keyset.remove(torch._C.DispatchKey.BackendSelect), tensors, *arguments
            )

        return kernel


def digest(strategy: Strategy) -> dict[str, str]:
    """Return a digest of each weight with its state in the optimizer."""
    digests = {}
    for name, parameter in strategy.model.named_parameters():
        state = strategy.optimizer.state.get(parameter, {})
        whole = hashlib.sha256(parameter.detach().numpy().tobytes())
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                whole.update(state[key].numpy().tobytes())
        digests[name] = whole.hexdigest()
    return digests


if __name__ == "__main__":
    Watcher(Path(sys.argv[1], f"watched-{os.environ['RANK']}.jsonl")).install()
    raise SystemExit(main(sys.argv[2:]))
