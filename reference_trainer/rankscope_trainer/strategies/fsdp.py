"""Fully sharded data parallel (FSDP2): each rank keeps only its part of every weight.

    forward    all_gather the weights of block 1, compute, drop them; block 2 ...
    backward   all_gather the weights of block n, compute, drop them,
               reduce_scatter their gradients: each rank keeps the sum of its own part
    update     each rank updates its own part, with its own part of the optimizer's state

`fully_shard` cuts each tensor along its first dimension over the ranks of a mesh. With `replicas`
the mesh has two axes (hybrid sharding): weights are cut over the ranks of a row, and the gradient
of a part is then summed (all_reduce) down its column, whose ranks hold the same part.

    replicas = 2, 4 ranks        part 0   part 1
                     replica 0   rank 0   rank 1     all_gather, reduce_scatter: along the row
                     replica 1   rank 2   rank 3     all_reduce: down the column

In mixed precision weights are sent and used in 16 bits, but kept, reduced and updated in 32. Small
gradients would vanish in fp16, so there the loss is scaled up first, and the gradients down again.
With `checkpoint_activations` a block keeps only its input and computes the rest again in backward.

A checkpoint has each tensor as a whole, in parts that say which they are: another number of ranks
reads other parts of the same tensors (resharding), and continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rankscope_trainer.data import Sample
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies.sharded import ShardedStrategy
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.versions import require_fully_shard

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 2.0**12


class FullySharded(ShardedStrategy):
    """Data parallel in which every weight, gradient and moment lives on one rank of a row."""

    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Cut the model apart: every block for itself, the rest as one."""
        require_fully_shard(world.device)
        self.microbatches = settings.microbatches_by_rank(world.world_size)[world.rank]
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0
        self._loss_scale = FP16_LOSS_SCALE if settings.precision == "fp16" else 1.0
        self._device = world.device
        model, mesh = build_model(settings).to(world.device), _mesh(settings, world)
        for name, block in model.blocks.items():
            if settings.checkpoint_activations:
                model.blocks[name] = checkpoint_wrapper(block)
            policy = _policy(settings, is_outermost=False)
            fully_shard(model.blocks[name], mesh=mesh, mp_policy=policy)
        policy = _policy(settings, is_outermost=True)
        self._sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = build_optimizer(settings, self.model)

    def train_batch(self, batch: Sample) -> Tensor:
        """Accumulate the gradients of all microbatches; the last backward reduces them."""
        parts = list(zip(*(half.chunk(self.microbatches) for half in batch), strict=True))
        total = torch.zeros((), device=self._device)
        for index, (bytes_BT, next_BT) in enumerate(parts):
            # Until then each rank keeps the whole gradient: this trades memory for messages.
            self._sharded.set_requires_gradient_sync(index == len(parts) - 1)
            loss = next_byte_loss(self.model(bytes_BT), next_BT) / len(parts)
            (loss * self._loss_scale).backward()
            total += loss.detach()
        for parameter in self.model.parameters():
            if parameter.grad is not None and self._loss_scale != 1.0:
                parameter.grad.div_(self._loss_scale)
        return total

    def validation_loss(self, batch: Sample) -> Tensor:
        """Return the loss of this rank's own part of the validation data."""
        bytes_BT, next_BT = batch
        loss = next_byte_loss(self.model(bytes_BT), next_BT)
        self._sharded.reshard()  # the outermost weights stay, expecting a backward
        return loss


def _mesh(settings: Settings, world: World) -> DeviceMesh:
    """Return the ranks as one row, or as a row for each replica."""
    if settings.replicas == 1:
        return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
    shape = (settings.replicas, world.world_size // settings.replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _policy(settings: Settings, *, is_outermost: bool) -> MixedPrecisionPolicy:
    """Return how weights are sent and used; sums of gradients, and the loss, stay in 32 bits."""
    return MixedPrecisionPolicy(
        param_dtype=PRECISIONS[settings.precision],
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if is_outermost else None,
    )
