"""Local SGD: every rank trains alone, and now and then all take the mean of their weights.

    average_every = 3
    step       1       2       3           4       5       6
    rank 0   update  update  update ┐    update  update  update ┐
    rank 1   update  update  update ┼ =  update  update  update ┼ =
    rank 2   update  update  update ┘    update  update  update ┘
                        mean of the weights             mean of the weights

What is saved: one all_reduce of the model's size in `average_every` steps, instead of one in each;
between two of them no rank waits for another, so a hiccup of one costs the others nothing unless
it lasts. What is paid: between two averages each rank computes its gradient at weights of its own,
which lack the last 1 to `average_every` - 1 updates of all others. The weights drift apart, more
so the larger `average_every`, the learning rate and the differences between the shards of data are.

Is it the same as data parallel?

- Plain SGD, `average_every = 1`: yes, up to rounding. All start a step at equal weights w, and the
  mean of w - rate * g_r is w - rate * (mean of g_r), which is what `ddp` computes.
- AdamW, `average_every = 1`: no. It divides by the size of the gradient, and the mean of quotients
  is not the quotient of means; its moments are those of the own gradients, and are not averaged.
- Clipping: no, each rank clips its own gradient.
- `average_every` of 2 or more: no, the second gradient is taken at weights that already differ.

Where the answer is no, all that can be said is that the loss falls. PyTorch has the averaging
(used here) and, around it, `PeriodicModelAverager`, which averages after the very first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from rankscope_trainer.data import Sample
from rankscope_trainer.strategies.strategy import (
    Strategy,
    accumulate_gradient,
    build_model,
    build_optimizer,
)

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World


class LocalSGD(Strategy):
    """Replicas that go their own ways, and meet in the middle from time to time."""

    is_replicated = False  # weights between two averages, and moments always, are each rank's own
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Build the model; all ranks draw the same first weights, so none are sent."""
        self.microbatches = settings.microbatches_for(world.world_size)
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0
        self.model = build_model(settings).to(world.device)
        self.optimizer = build_optimizer(settings, self.model)
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._average_every = settings.average_every
        self._updates = 0  # since the last average

    def train_batch(self, batch: Sample) -> Tensor:
        """Accumulate this rank's own gradient; nothing is sent."""
        return accumulate_gradient(self.model, batch, self.microbatches)

    def update(self) -> None:
        """Take a step alone; after every `average_every` of them, average the weights."""
        super().update()
        self._updates += 1
        if self._updates == self._average_every:
            average_parameters(self.model.parameters(), self._group)
            self._updates = 0

    def state(self) -> dict[str, Any]:
        """Return how long ago the last average was."""
        return {"updates": self._updates}

    def load_state(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._updates = state["updates"]
