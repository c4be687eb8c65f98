"""A run that lasts a while on any machine: past its last step, more of them until time is up.

All ranks must stop after the same step. Each knows how many steps fill the time that is left, by
its own clock and its own mean step; they take the largest number. That is one all_reduce of 8
bytes at the last step, and one more at the end of each stretch that was too short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

AGREEMENT_BYTES = 8


class Duration:
    """Counts from its making, at `step`, to `least_seconds` later; 0: nothing is to be filled."""

    def __init__(
        self,
        least_seconds: float,
        step: int,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least_seconds = least_seconds
        self._first = step
        self._device = device
        self._clock = clock
        self._began = clock()

    def steps_left(self, step: int) -> int:
        """Return how many steps after this one all ranks are to train; all ranks call this."""
        if not self._least_seconds:
            return 0
        passed = self._clock() - self._began
        mean = passed / max(1, step - self._first)
        wanted = math.ceil(max(0.0, self._least_seconds - passed) / mean)
        agreed = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed)
