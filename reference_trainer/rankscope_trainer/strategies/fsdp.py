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

With `regroup` no checkpoint is needed where a rank is lost, as long as each of its parts is held by
another replica: those that are left send each part around once, and cut the whole anew.

                     part 0   part 1                       part 0   part 1   part 2
        replica 0    rank 0   rank 1                       rank 0   rank 2   rank 3
        replica 1    rank 2   rank 3      rank 1 dies      (no part is held twice until one comes)
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rankscope_trainer.data import Sample
from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.strategies.sharded import ShardedStrategy
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.versions import require_fully_shard

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 2.0**12

logger = logging.getLogger("rankscope_trainer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank holds of each tensor: the `number`-th of `of` parts along its first dimension."""

    number: int
    of: int
    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]  # of the optimizer, by weight; a scalar is no part


class FullySharded(ShardedStrategy):
    """Data parallel in which every weight, gradient and moment lives on one rank of a row."""

    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Cut the model apart: every block for itself, the rest as one."""
        require_fully_shard(world.device)
        self._settings, self._device = settings, world.device
        self._loss_scale = FP16_LOSS_SCALE if settings.precision == "fp16" else 1.0
        self._place: tuple[int, int] | None = None  # which of how many parts, once it has one
        self._kept: list[Part] = []  # of the group before, until all have theirs of the next one
        self._share(world)
        self.model = build_model(settings).to(world.device)
        self._names = [name for name, _ in self.model.named_parameters()]
        if not settings.regroup:
            self._cut(_mesh(settings, world))
        self.optimizer = build_optimizer(settings, self.model)

    def _share(self, world: World) -> None:
        """Take this rank's part of each step."""
        self.microbatches = self._settings.microbatches_by_rank(world.world_size)[world.rank]
        self.shard, self.num_shards = world.rank, world.world_size
        self.writes_losses = world.rank == 0

    def _cut(self, mesh: DeviceMesh) -> None:
        """Cut the model, which is whole, over the ranks of a mesh."""
        settings, model = self._settings, self.model
        assert isinstance(model, GPT)
        for name, block in model.blocks.items():
            if settings.checkpoint_activations:
                model.blocks[name] = checkpoint_wrapper(block)
            policy = _policy(settings, is_outermost=False)
            fully_shard(model.blocks[name], mesh=mesh, mp_policy=policy)
        policy = _policy(settings, is_outermost=True)
        self._sharded = fully_shard(model, mesh=mesh, mp_policy=policy)

    def regroup(self, world: World, *, is_untrained: bool = True, is_current: bool = True) -> None:
        """Gather each part from a rank that holds it, and cut the whole anew.

        Where that breaks off, the parts of before are still there for the next group. Raises
        RuntimeError where a part was held by lost ranks alone.
        """
        if not is_current:
            self._place, self._kept = None, []
        if self._place is not None:
            self._kept.append(self._part(*self._place))
            self._place = None
        parts = [] if is_untrained else _gathered(self._kept)
        self._share(world)
        self.model = build_model(self._settings).to(self._device)
        mesh = _mesh(self._settings, world)
        self._cut(mesh)
        self.optimizer = build_optimizer(self._settings, self.model)
        gc.collect()  # hooks of the model before refer to it
        if parts:
            self._take(parts)
        self._place = mesh.get_local_rank("shard"), mesh.size(-1)
        dist.barrier()
        self._kept = []
        if world.world_size % self._settings.replicas:
            logger.warning("%d ranks: no part is held by two of them", world.world_size)

    def _part(self, number: int, of: int) -> Part:
        """Return what this rank holds.

        Only the optimizer's tensors are its own for sure: a step that broke off may have left
        gathered ones in the model.
        """
        weights, state = {}, {}
        for name, weight in zip(self._names, self.optimizer.param_groups[0]["params"], strict=True):
            weights[name] = _own(weight.detach())
            known = self.optimizer.state.get(weight, {})
            state[name] = {key: _own(value) for key, value in known.items()}
        return Part(number=number, of=of, weights=weights, state=state)

    def _take(self, parts: Sequence[Part]) -> None:
        """Take this rank's own of the parts that make the whole."""
        for name, weight in zip(self._names, self.model.parameters(), strict=True):
            assert isinstance(weight, DTensor)
            whole = torch.cat([part.weights[name] for part in parts])
            weight.to_local().detach().copy_(_cut_as(weight, whole).to_local())
            for key, first in parts[0].state[name].items():
                values = [part.state[name][key] for part in parts]
                self.optimizer.state[weight][key] = (
                    _cut_as(weight, torch.cat(values)) if first.ndim else first
                )

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


def _gathered(own: Sequence[Part]) -> list[Part]:
    """Return the parts of a whole, each from the first rank that has it.

    All ranks call this. Raises RuntimeError where no whole is left.
    """
    held: list[dict[tuple[int, int], int]] = [{}] * dist.get_world_size()
    places = {(part.of, part.number): index for index, part in enumerate(own)}
    dist.all_gather_object(held, places)
    missing = "all parts"
    for count in sorted({of for places in held for of, _ in places}):
        sources = [_first_with(held, (count, number)) for number in range(count)]
        if None not in sources:
            return [
                _sent(own[places[count, number]] if source == dist.get_rank() else None, source)
                for number, source in enumerate(sources)
                if source is not None
            ]
        missing = f"part {sources.index(None)} of {count}"
    raise RuntimeError(f"what lost ranks alone have held is lost: {missing}")


def _first_with(held: Sequence[dict[tuple[int, int], int]], place: tuple[int, int]) -> int | None:
    return next((rank for rank, places in enumerate(held) if place in places), None)


def _sent(part: Part | None, source: int) -> Part:
    """Return the part that a rank sends to all."""
    sent = [part]
    dist.broadcast_object_list(sent, src=source)
    assert sent[0] is not None
    return sent[0]


def _own(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def _cut_as(weight: DTensor, whole: Tensor) -> DTensor:
    """Cut a whole tensor, which all ranks have, as a weight is."""
    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _mesh(settings: Settings, world: World) -> DeviceMesh:
    """Return the ranks as one row, or as a row for each replica if they are enough for that."""
    if settings.replicas == 1 or world.world_size % settings.replicas:
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
