"""Data parallel: every rank holds the whole model and trains it on its own part of the data.

    rank 0   forward  backward ┐                 ┌ the same update
    rank 1   forward  backward ┤ mean gradient   ├ the same update
    rank 2   forward  backward ┘ (all_reduce)    └ the same update

`DistributedDataParallel` reduces gradients in buckets while the backward still runs: as soon as
every gradient of a bucket is there, its all_reduce starts. With several microbatches the
gradients are added up locally under `no_sync`, and only the last backward communicates.

    `--comm-hook`      what is sent in place of the gradients; `comm_hooks.py`
    `--static-graph`   each step uses the same parameters equally often, so DDP need only count
                       once; with activation checkpointing it could not do without
    `--uneven-ratio`   some ranks run out of batches early; `uneven.py`
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rankscope_trainer.data import Sample
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies import comm_hooks
from rankscope_trainer.strategies.strategy import Strategy, build_model, build_optimizer

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


class DataParallel(Strategy):
    """Replicas of the model, kept equal by the mean of their gradients."""

    is_replicated = True
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Wrap the model; DDP sends rank 0's weights to the others as it is constructed."""
        self._settings = settings
        self._context = settings.context
        self._device = world.device
        self.model = build_model(settings).to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        self._memory: comm_hooks.Memory | None = None
        self._hook_shape = f"{settings.comm_hook} {settings.powersgd_rank} {settings.bucket_mib}"
        if settings.comm_hook == "fp8":  # a rank adds up a piece, of which there is one for each
            self._hook_shape += f" on {world.world_size} ranks"
        self._is_uneven = settings.uneven_ratio > 0
        self._replica: DistributedDataParallel | None = None
        self._share(world)
        if not settings.regroup:
            self._wrap()
            if settings.static_graph:
                self.warm_up()  # the backward that records the graph must not be of `no_sync`

    def regroup(self, world: World, *, is_untrained: bool = True, is_current: bool = True) -> None:
        """Reduce gradients with the ranks that there are now.

        The reducer before must be gone first: its hooks on the parameters would reduce as well.
        """
        self._share(world)
        self._replica = None
        gc.collect()
        self._wrap()

    def _share(self, world: World) -> None:
        """Take this rank's part of each step."""
        self.microbatches = self._settings.microbatches_by_rank(world.world_size)[world.rank]
        self._microbatches_mean = self._settings.mean_microbatches(world.world_size)
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0

    def _wrap(self) -> None:
        self._replica = DistributedDataParallel(
            self.model,
            bucket_cap_mb=self._settings.bucket_mib,
            static_graph=self._settings.static_graph,
        )
        self._memory = comm_hooks.register(self._replica, self._settings)

    @property
    def replica(self) -> DistributedDataParallel:
        """The model as DDP wraps it."""
        assert self._replica is not None, "no group was made yet"
        return self._replica

    def train_batch(self, batch: Sample) -> Tensor:
        """Accumulate the gradients of all microbatches; the last backward reduces them."""
        parts = list(zip(*(half.chunk(self.microbatches) for half in batch), strict=True))
        total = torch.zeros((), device=self._device)
        for index, (bytes_BT, next_BT) in enumerate(parts):
            is_last = index == len(parts) - 1
            with contextlib.nullcontext() if is_last else self.replica.no_sync():
                loss = next_byte_loss(self.replica(bytes_BT), next_BT) / self._microbatches_mean
                self.learnt(loss).backward()
            total += loss.detach()
        return total * (self._microbatches_mean / len(parts))  # the mean over its own

    def learnt(self, loss: Tensor) -> Tensor:
        """Return what a backward begins at, of the loss of a microbatch and its share of a step."""
        return loss

    def uneven(self) -> contextlib.AbstractContextManager[Any]:
        """Let ranks that have no batches left mirror the collectives of those that do.

        The mean is then taken over the ranks that still have batches. When the last one is done,
        its weights go to all.
        """
        join: contextlib.AbstractContextManager[Any] = self.replica.join(
            divide_by_initial_world_size=False, enable=self._is_uneven
        )
        return join

    def state(self) -> dict[str, Any]:
        """Return the errors that PowerSGD and fp8 still owe; the other hooks remember nothing."""
        return {} if self._memory is None else self._memory.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Put them back."""
        if self._memory is not None:
            self._memory.load_state(state, self._device)

    def checkpoint_shape(self) -> dict[str, str]:
        """Errors fit the matrices, buckets and ranks that they were made with only."""
        return {} if self._memory is None else {"comm_hook": self._hook_shape}

    def warm_up(self) -> None:
        """Let DDP regroup its buckets, which it does once, after the first backward.

        From three ranks on, the order in which an all_reduce adds up depends on where in its
        bucket a number is. A resumed run that regrouped one step late would therefore differ
        in the last bits from the run it continues.
        """
        blank = torch.zeros((1, self._context), dtype=torch.long, device=self._device)
        next_byte_loss(self.replica(blank), blank).backward()
        self.model.zero_grad(set_to_none=True)
