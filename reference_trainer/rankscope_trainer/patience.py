"""Early stopping: training ends when validation has not become better for a while.

All ranks must stop after the same step, so they take the mean of what each of them knows. So does a
checkpoint that is kept for its loss.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

PATIENCE_BYTES = 16


class Patience:
    """Counts the validations in a row that brought nothing."""

    def __init__(self, limit: int, device: torch.device, *, agrees: bool = False) -> None:
        """Stop after `limit` validations without a better loss; 0: never.

        With a limit, and where `agrees`, all ranks agree on the loss.
        """
        self.best = math.inf
        self.in_vain = 0
        self._limit = limit
        self._agrees = agrees or limit > 0
        self._device = device

    @property
    def is_exhausted(self) -> bool:
        """Return whether training is to end."""
        return 0 < self._limit <= self.in_vain

    def observe(self, loss: float | None) -> float | None:
        """Take this rank's validation loss, None where unknown; return that of all ranks."""
        if not self._agrees:
            return loss
        mean = agreed_mean(loss, self._device)
        if mean is None:
            return None
        self.in_vain = 0 if mean < self.best else self.in_vain + 1
        self.best = min(self.best, mean)
        return mean


def agreed_mean(loss: float | None, device: torch.device) -> float | None:
    """Return the mean of what the ranks know, None where none knows a loss; all ranks call this."""
    known = [0.0, 0.0] if loss is None else [loss, 1.0]
    total = torch.tensor(known, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1]) if total[1] else None
