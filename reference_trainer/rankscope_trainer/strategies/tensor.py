"""Tensor parallel: every rank computes a part of every layer; all ranks draw the same batch.

    attention   project_in by heads     each rank computes its own heads         (by columns)
                project_out             each rank has a part of the sum          (by rows)
    network     first layer             each rank computes its own features      (by columns)
                second layer            each rank has a part of the sum          (by rows)

Two layers in a row, the first cut by columns, the second by rows, need only one all_reduce, after
the second; backward needs one before the first. Embedding, normalisations and residual stream are
the same on all ranks.

With `sequence_parallel` each rank holds only its positions of the residual stream, and normalises
only these. The all_reduce becomes a reduce_scatter (to the positions) after the second layer and
an all_gather (from the positions) before the first: as many bytes, but less memory and work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rankscope_trainer.data import Sample
from rankscope_trainer.model import GPT
from rankscope_trainer.strategies.sharded import ShardedStrategy
from rankscope_trainer.strategies.strategy import (
    accumulate_gradient,
    build_model,
    build_optimizer,
)
from rankscope_trainer.strategies.versions import require_own_weights

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

POSITIONS = Shard(1)  # of a tensor with batch, positions, width


class TensorParallel(ShardedStrategy):
    """One model, of which each rank computes some heads and some features."""

    shard, num_shards = 0, 1
    reports_loss = True

    def __init__(self, settings: Settings, world: World) -> None:
        """Cut the layers of the model apart over all ranks."""
        self.microbatches = settings.microbatches_for(world.world_size)
        self.writes_losses = world.rank == 0
        mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("tensor",))
        self.model = cut_layers(
            build_model(settings).to(world.device), mesh, by_positions=settings.sequence_parallel
        )
        self.optimizer = build_optimizer(settings, self.model)

    def train_batch(self, batch: Sample) -> Tensor:
        """Run one microbatch after the other; the loss is the same on all ranks."""
        loss = accumulate_gradient(self.model, batch, self.microbatches)
        add_up_partial_gradients(self.model)
        return loss


def cut_layers(model: GPT, mesh: DeviceMesh, *, by_positions: bool) -> GPT:
    """Make each parameter of the model (or of a stage) a DTensor on `mesh`, and return the model.

    Also what stays whole becomes one, as then optimizer and clipping meet only one kind of tensor.
    """
    require_own_weights()
    between = POSITIONS if by_positions else Replicate()
    norm = SequenceParallel() if by_positions else Whole()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.norm_attention": norm,
        "blocks.*.attention.project_in": ColwiseParallel(input_layouts=between),
        "blocks.*.attention.project_out": RowwiseParallel(output_layouts=between),
        "blocks.*.norm_network": norm,
        "blocks.*.network.0": ColwiseParallel(input_layouts=between),
        "blocks.*.network.2": RowwiseParallel(output_layouts=between),
    }
    if model.embedding is not None:
        plan |= {"embedding.bytes": Whole(), "embedding.positions": Whole()}
        plan["embedding"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=between
        )
    if model.head is not None:
        plan["head.norm"] = norm
        plan["head.project"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    # Every rank has drawn the same weights: none has to send its own to the others.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    return model


def add_up_partial_gradients(model: nn.Module) -> None:
    """Add up the gradients of normalisations, of which each rank knows only its positions' part.

    DTensor would do so by itself wherever a whole gradient is needed, but each time anew: AdamW
    alone needs it three times.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(part.is_partial() for part in gradient.placements):
            parameter.grad = gradient.redistribute(placements=[Replicate()])


class Whole(ParallelStyle):
    """A module that every rank computes as a whole, on the same input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def keep(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                whole = DTensor.from_local(
                    parameter.detach(), mesh, (Replicate(),), run_check=False
                )
                module.register_parameter(key, nn.Parameter(whole))

        def to_dtensor(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
                for tensor in inputs
            )

        def to_tensor(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, keep, to_dtensor, to_tensor)
