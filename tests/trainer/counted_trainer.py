"""Run the trainer and write down each operation that reaches a process group, by step.

A kernel at BackendSelect sees every c10d operation of the process, also those that C++ issues
(DDP's reducer). It shares nothing with the agent's hooks, so it can judge both what the agent
recorded and what the trainer expected. Usage: torchrun ... counted_trainer.py FOLDER ARGUMENTS
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankscope_trainer.__main__ import main
from rankscope_trainer.faults.injector import Injector

# operator -> name of the operation, and the argument whose size counts
OPERATORS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce_coalesced", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv_any_source", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all_single", 1),
}


class Counter:
    """What reached the process groups: (operation, bytes), by the step in which it did."""

    def __init__(self) -> None:
        self.step = 0
        self.by_step: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self._library = torch.library.Library("c10d", "IMPL")

    def install(self) -> None:
        for operator in OPERATORS:
            kernel = self._kernel(operator)
            self._library.impl(operator, kernel, "BackendSelect", with_keyset=True)
        begin_step = Injector.begin_step

        def noting_begin_step(injector: Injector, step: int) -> None:
            self.step = step
            begin_step(injector, step)

        Injector.begin_step = noting_begin_step  # type: ignore[method-assign,assignment]

    def _kernel(self, operator: str) -> Callable[..., Any]:
        operation, position = OPERATORS[operator]
        redispatch = getattr(torch.ops.c10d, operator).default.redispatch

        def kernel(keyset: Any, *arguments: Any) -> Any:
            size = 0 if position is None else num_bytes(arguments[position])
            self.by_step[self.step].append((operation, size))
            return redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *arguments)

        return kernel


def num_bytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(num_bytes(part) for part in argument)


if __name__ == "__main__":
    counter = Counter()
    counter.install()
    code = main(sys.argv[2:])
    document = json.dumps(counter.by_step)
    Path(sys.argv[1], f"operations-{os.environ.get('RANK', '0')}.json").write_text(document)
    raise SystemExit(code)
