"""What the training loop asks of every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rankscope_trainer.data import Sample
from rankscope_trainer.model import GPT

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class Strategy(Protocol):
    """One way of training the model on several ranks."""

    model: GPT  # what this rank computes: the whole model, or its own part of it
    microbatches: int  # parts of this rank's batch
    shard: int  # which part of the data this rank draws
    num_shards: int
    is_replicated: bool  # every rank holds the same weights, so a checkpoint needs them once
    reports_loss: bool  # this rank knows the loss
    writes_losses: bool  # exactly one rank does: its losses go to the file

    def warm_up(self) -> None:
        """Repeat what the first step leaves behind, before training goes on from a checkpoint."""

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Run forward and backward over all microbatches; return the mean loss where known."""

    def validate_batch(self, batch: Sample) -> Tensor | None:
        """Run forward only; return the mean loss where known."""

    def clip(self, max_norm: float) -> None:
        """Scale the gradient so that the norm of the whole model's is at most `max_norm`."""


def build_model(settings: Settings) -> GPT:
    """Build the whole model: the same on every rank."""
    return GPT(
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        context=settings.context,
        dropout=settings.dropout,
        seed=settings.seed,
    )
