"""What the training loop asks of every strategy, and what most of them do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankscope_trainer.data import Sample
from rankscope_trainer.known_time import layer_times, make_times_known
from rankscope_trainer.model import GPT, next_byte_loss

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


class Strategy(ABC):
    """One way of training the model on several ranks."""

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module  # what this rank computes: the whole model, or its own part of it
    microbatches: int  # parts of this rank's batch
    shard: int  # which part of the data this rank draws
    num_shards: int
    is_replicated: bool  # every rank holds the same weights, so a checkpoint needs them once
    reports_loss: bool  # this rank knows the loss
    writes_losses: bool  # exactly one rank does: its losses go to the file
    is_sharded: bool = False  # True: the ranks together write model and optimizer, see `save`
    can_recut: bool = False  # True: another number of ranks reads the parts of all, see `recut`
    needs_data: bool = True  # False: this rank draws no batches (a parameter server, say)

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to do
        """Repeat what the first step leaves behind, before training goes on from a checkpoint."""

    @abstractmethod
    def train_batch(self, batch: Sample) -> Tensor | None:
        """Run forward and backward over all microbatches; return the mean loss where known."""

    def validation_loss(self, batch: Sample) -> Tensor | None:
        """Run forward only; return the mean loss of this rank's part of the data, where known."""
        bytes_BT, next_BT = batch
        return next_byte_loss(self.model(bytes_BT), next_BT)

    def uneven(self) -> AbstractContextManager[Any]:
        """Return what surrounds all steps, in which some ranks may run out of batches early."""
        return nullcontext()

    def clip(self, max_norm: float) -> float | None:
        """Scale the gradient so that the norm of the whole model's is at most `max_norm`.

        Returns that norm before scaling, where this rank knows it. An infinite `max_norm` only
        measures.
        """
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def update(self) -> None:
        """Take the optimizer's step and forget the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:  # noqa: B027
        """Finish what is still in flight: before each checkpoint, and after the last step."""

    def metrics(self) -> dict[str, float]:
        """Return what else this rank measured in the step that ended, for the agent."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank beside model and optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Put back what `state` returned."""

    def checkpoint_shape(self) -> dict[str, str]:
        """Return what a checkpoint must also agree on to be resumed; the same on all ranks."""
        return {}

    def save(self, folder: Path) -> None:
        """Write model and optimizer into `folder`, all ranks together, where `is_sharded`."""
        raise NotImplementedError(f"{type(self).__name__} is not sharded")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        raise NotImplementedError(f"{type(self).__name__} is not sharded")

    def recut(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take this rank's own out of the parts that other ranks wrote, where `can_recut`."""
        raise NotImplementedError(f"{type(self).__name__} keeps its number of ranks")

    def regroup(self, world: World, *, is_untrained: bool = True, is_current: bool = True) -> None:
        """Train on in another group, where the settings say `regroup`: weights and moments stay.

        With that setting the strategy is made without a group, and this is called for the first.
        The two words are for models of which ranks hold parts: whether no rank has trained yet, and
        else whether what this one holds is as new as any.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps its group")

    def close(self) -> None:  # noqa: B027
        """Let go of threads, processes and shared memory, after the last step."""


def build_model(settings: Settings) -> GPT:
    """Build the whole model: the same on every rank."""
    model = GPT(
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
        context=settings.context,
        dropout=settings.dropout,
        seed=settings.seed,
        mask_buffer=settings.mask_buffer,
    )
    if settings.layer_seconds:
        make_times_known(model, layer_times(settings.layer_seconds, settings.layers))
    return model


def accumulate_gradient(model: torch.nn.Module, batch: Sample, microbatches: int) -> Tensor:
    """Add up the gradient of the batch's mean loss, part by part; return that loss."""
    parts = list(zip(*(half.chunk(microbatches) for half in batch), strict=True))
    total = torch.zeros((), device=batch[0].device)
    for bytes_BT, next_BT in parts:
        loss = next_byte_loss(model(bytes_BT), next_BT) / len(parts)
        loss.backward()
        total += loss.detach()
    return total


def build_optimizer(settings: Settings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of the settings, for the parameters of this rank."""
    optimizer = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.AdamW
    return optimizer(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
