"""Early stopping: training ends when validation has not become better for a while.

All ranks must stop after the same step, so they take the mean of what each of them knows.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

PATIENCE_BYTES = 16


class Patience:
    """Counts the validations in a row that brought nothing."""

    def __init__(self, limit: int, device: torch.device) -> None:
        """Stop after `limit` validations without a better loss; 0: never."""
        self.best = math.inf
        self.in_vain = 0
        self._limit = limit
        self._device = device

    @property
    def is_exhausted(self) -> bool:
        """Return whether training is to end."""
        return 0 < self._limit <= self.in_vain

    def observe(self, loss: float | None) -> float | None:
        """Take this rank's validation loss, None where unknown; return that of all ranks."""
        if not self._limit:
            return loss
        known = [0.0, 0.0] if loss is None else [loss, 1.0]
        total = torch.tensor(known, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        mean = float(total[0] / total[1])
        self.in_vain = 0 if mean < self.best else self.in_vain + 1
        self.best = min(self.best, mean)
        return mean
