"""Data, pipeline and tensor parallel in one mesh of ranks, here 2 x 2 x 2:

                    stage 0                  stage 1
    data shard 0    rank 0 ═ rank 1   ───>   rank 2 ═ rank 3
                      ┊        ┊               ┊        ┊
    data shard 1    rank 4 ═ rank 5   ───>   rank 6 ═ rank 7

    ═  tensor     inside every layer: heads and features of one microbatch, most messages
    ─  pipeline   between two stages: activations of each microbatch and their gradients
    ┊  data       once a step: gradients; weights are cut over these ranks (FSDP2)

The ranks that talk most are neighbours, so that they share a machine. Each axis of the mesh is a
set of process groups, and each rank is in one of every axis: `mesh["tensor"]` of rank 3 is the
group of ranks 2 and 3. The parts are those of the other files: layers are cut as by `tensor`,
stages follow PyTorch's 1F1B as in `pipeline`, and `fully_shard` cuts what is left, as in `fsdp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import Schedule1F1B

from rankscope_trainer.data import Sample
from rankscope_trainer.model import GPT, VOCABULARY, next_byte_loss
from rankscope_trainer.strategies.sharded import ShardedStrategy
from rankscope_trainer.strategies.stages.schedule import Stage, example, run_schedule
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.tensor import add_up_partial_gradients, cut_layers
from rankscope_trainer.strategies.versions import require_schedule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

AXES = ("data", "pipeline", "tensor")  # the last one changes fastest with the rank


class Hybrid(ShardedStrategy):
    """One stage, of which this rank computes a part of every layer, for one shard of the data."""

    def __init__(self, settings: Settings, world: World) -> None:
        """Find this rank's place on each axis, and cut the model along all three."""
        require_schedule("1f1b", world.device)
        sizes = settings.data_parallel, settings.pipeline_parallel, settings.tensor_parallel
        self.microbatches = settings.microbatches_for(world.world_size)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=AXES)
        self.shard, stage, part = (mesh.get_local_rank(axis) for axis in AXES)
        self.num_shards, num_stages, _ = sizes
        self._is_first, self.reports_loss = stage == 0, stage == num_stages - 1
        self.writes_losses = self.reports_loss and self.shard == 0 and part == 0
        self.stages = mesh["pipeline"].get_group()
        # One group for both axes along which a tensor may be cut: clipping adds up over both.
        mesh["data", "tensor"]._flatten()

        own = build_model(settings).keep_stage(stage, num_stages).to(world.device)
        self.model = cut_layers(own, mesh["tensor"], by_positions=settings.sequence_parallel)
        if settings.data_parallel > 1:
            _cut_over_data(own, mesh["data"])
        self.optimizer = build_optimizer(settings, self.model)
        # Of the residual stream a rank may hold only its own positions.
        parts = settings.tensor_parallel if settings.sequence_parallel else 1
        stream = example(settings, settings.width, positions=settings.context // parts)
        self._schedule = Schedule1F1B(
            Stage(
                self.model,
                stage,
                num_stages,
                world.device,
                input_args=example(settings, 0) if self._is_first else stream,
                output_args=example(settings, VOCABULARY) if self.reports_loss else stream,
                group=self.stages,
            ),
            self.microbatches,
            loss_fn=next_byte_loss,
        )

    def train_batch(self, batch: Sample) -> Tensor | None:
        """Run the schedule once; its last backward reduces the gradients over the data axis."""
        loss = self._run(self._schedule.step, batch)
        add_up_partial_gradients(self.model)  # `fully_shard` has done so, if it was there
        return loss

    def validation_loss(self, batch: Sample) -> Tensor | None:
        """Run the schedule without backwards."""
        loss = self._run(self._schedule.eval, batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the weights stay, expecting a backward
        return loss

    def _run(self, schedule: Callable[..., object], batch: Sample) -> Tensor | None:
        return run_schedule(schedule, batch, is_first=self._is_first, is_last=self.reports_loss)


def _cut_over_data(stage: GPT, mesh: DeviceMesh) -> None:
    """Cut each DTensor of the stage once more; the weights stay whole until the last backward.

    A pipeline uses them for many microbatches in turn: to collect them anew for each would cost
    more messages than it saves memory.
    """
    # The scores are a view, and nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)
