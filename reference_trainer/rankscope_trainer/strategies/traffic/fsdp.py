"""What FSDP2 sends: the weights of a group before they are used, its gradient after the backward.

Each block is a group, and so is what lies outside of the blocks. A rank's part of a tensor is cut
along the first dimension and filled up so that all parts are equally large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rankscope_trainer.model import GPT
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.dcp import dcp_load, dcp_save
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    by_step = {STARTUP: dcp_load() if resumed_after else Traffic()}
    training = fsdp_step(settings, world_size)
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = Traffic(training)
        if settings.validate_every and step % settings.validate_every == 0:
            for _ in range(settings.validate_batches):
                by_step[step] += fsdp_gathers(settings, world_size)
        if settings.checkpoint_dir and step % settings.checkpoint_every == 0:
            by_step[step] += dcp_save()
    return by_step


def fsdp_step(settings: Settings, world_size: int) -> Traffic:
    """Return what a training step sends."""
    microbatches = settings.microbatches_for(world_size)
    step = Traffic()
    for _ in range(microbatches):
        step += fsdp_gathers(settings, world_size)
        # Once more for backward, but the outermost weights have stayed.
        step += fsdp_gathers(settings, world_size, blocks_only=True)
    shards = world_size // settings.replicas
    for part in _parts(settings, shards):
        step[Message("reduce_scatter_tensor", part * shards * FLOAT32_BYTES)] += 1
        if settings.replicas > 1:
            step[Message("all_reduce", part * FLOAT32_BYTES)] += 1
    if settings.takes_norm:
        norms = FLOAT32_BYTES * len(list(build_model(settings).parameters()))
        step[Message("all_reduce", norms)] += 1
    return step


def fsdp_gathers(settings: Settings, world_size: int, *, blocks_only: bool = False) -> Traffic:
    """Return the all_gathers of one pass through the model."""
    size = WEIGHT_BYTES[settings.precision]
    parts = _parts(settings, world_size // settings.replicas)
    return Traffic(
        Message("all_gather_into_tensor", part * size)
        for part in (parts[:-1] if blocks_only else parts)
    )


def fsdp_groups(model: GPT) -> list[dict[str, torch.Size]]:
    """Return the parameters of each block, then those outside: names and shapes."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    inside = [
        {name: shapes[name] for name in shapes if name.startswith(f"blocks.{layer}.")}
        for layer in model.blocks
    ]
    return [*inside, {name: shapes[name] for name in shapes if not name.startswith("blocks.")}]


def part_size(shape: Sequence[int], shards: int) -> int:
    """Return the numbers in one rank's part of a tensor, filled up."""
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def _parts(settings: Settings, shards: int) -> list[int]:
    """Return the numbers in one rank's part of each group."""
    return [
        sum(part_size(shape, shards) for shape in group.values())
        for group in fsdp_groups(build_model(settings))
    ]
