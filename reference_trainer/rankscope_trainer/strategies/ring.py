"""Data parallel by hand: the gradient goes around a ring, in pieces, twice.

Cut the gradient into N equal pieces, and let every rank send to the next one only. Numbers are
ranks whose gradients a piece holds the sum of; `*` is all of them. Three ranks:

                  piece 0   piece 1   piece 2      in each step every rank sends one piece:
    start  rank 0    0         0         0         rank r sends piece r, then r - 1, then r - 2 ...
           rank 1    1         1         1
           rank 2    2         2         2
    reduce: what arrives is added; after N - 1 steps each rank holds one finished piece
           rank 0    0         *         0 2
           rank 1    0 1       1         *
           rank 2    *         1 2       2
    gather: what arrives replaces; after N - 1 more steps each rank holds all of them
           rank 0    *         *         *

So a rank sends 2 (N - 1) messages of 1/N of the gradient: 2 (N - 1) / N times its size, 1.50 of it
for 4 ranks and 2.00 for 4000. Where ranks alone add up no all_reduce sends less, for each must hand
out what only it knows and receive what only the others know (Patarasuk and Yuan, 2009); a switch
that adds up on the way needs the size once. Gathering all at one rank costs that rank N - 1 times
the size, and again to hand it out. What a ring pays is time: its steps wait for each other, so for
small gradients 2 (N - 1) delays count more than the bytes, and a tree (`tree.py`) is quicker.

A piece is finished on one rank and only copied by the others, so all ranks get the same bits.
`--reduce-with tree` adds up by a tree instead, `--reduce-with library` by the library's all_reduce.
The loss equals that of a single process up to the order of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rankscope_trainer.data import Sample
from rankscope_trainer.strategies.strategy import (
    Strategy,
    accumulate_gradient,
    build_model,
    build_optimizer,
)
from rankscope_trainer.strategies.tree import tree_all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


class Ring(Strategy):
    """Replicas of the model, kept equal by a reduction that one can read."""

    is_replicated = True
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Build the model; all ranks draw the same first weights, so none are sent."""
        self._settings = settings
        self.regroup(world)
        self.model = build_model(settings).to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        ways: dict[str, Callable[[Tensor], object]] = {
            "ring": ring_all_reduce, "tree": tree_all_reduce, "library": dist.all_reduce,
        }  # fmt: skip
        self._all_reduce = ways[settings.reduce_with]

    def regroup(self, world: World, *, is_untrained: bool = True, is_current: bool = True) -> None:
        """Go around with the ranks that there are now."""
        self.microbatches = self._settings.microbatches_by_rank(world.world_size)[world.rank]
        self._microbatches_mean = self._settings.mean_microbatches(world.world_size)
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0

    def train_batch(self, batch: Sample) -> Tensor:
        """Accumulate this rank's gradient, then replace it by the mean over all ranks."""
        loss = accumulate_gradient(self.model, batch, self.microbatches)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = parameters_to_vector(gradients)
        flat *= self.microbatches / self._microbatches_mean
        flat = F.pad(flat, (0, padded_length(len(flat), self.num_shards) - len(flat)))
        self._all_reduce(flat)
        flat /= self.num_shards
        vector_to_parameters(flat, gradients)  # what was padded is left over
        return loss


def ring_all_reduce(flat: Tensor) -> None:
    """Replace `flat` on every rank by the sum over all ranks; N divides its length."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pieces = flat.chunk(num_ranks)
    arrived = torch.empty_like(pieces[0])
    for step in range(num_ranks - 1):
        _pass_on(pieces[(rank - step) % num_ranks], arrived)
        pieces[(rank - step - 1) % num_ranks].add_(arrived)
    for step in range(num_ranks - 1):
        _pass_on(pieces[(rank + 1 - step) % num_ranks], pieces[(rank - step) % num_ranks])


def padded_length(length: int, num_ranks: int) -> int:
    """Return the next multiple of `num_ranks`, so that all pieces are equally long."""
    return -(-length // num_ranks) * num_ranks


def _pass_on(sent: Tensor, received: Tensor) -> None:
    """Send to the next rank and receive from the one before, both at once.

    If all ranks sent first and received afterwards, each could wait for the other forever.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % num_ranks),
        ]
    )
    for work in works:
        work.wait()
