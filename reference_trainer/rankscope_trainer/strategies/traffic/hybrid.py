"""What data x pipeline x tensor parallelism sends: each part on its own axis of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope_trainer.model import GPT
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.dcp import dcp_load, dcp_save
from rankscope_trainer.strategies.traffic.fsdp import fsdp_groups, part_size
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)
from rankscope_trainer.strategies.traffic.tensor import layer_messages, norm_gradients

BY_COLUMNS = (
    "project_in.weight",
    "project_in.bias",
    "network.0.weight",
    "network.0.bias",
    "head.project.weight",
)
BY_ROWS = ("project_out.weight", "network.2.weight")


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    stage = rank // settings.tensor_parallel % settings.pipeline_parallel
    model = build_model(settings).keep_stage(stage, settings.pipeline_parallel)
    vote = _crossings(settings, stage, INT32_BYTES, both_ways=True)
    training = hybrid_step(settings, stage, model)
    validation = _data_axis(settings, model, is_training=False)
    validation += _microbatches(settings, stage, model, is_training=False)
    by_step = {STARTUP: dcp_load() if resumed_after else Traffic()}
    must_vote = True
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = training + vote if must_vote else Traffic(training)
        must_vote = bool(settings.validate_every) and step % settings.validate_every == 0
        if must_vote:
            by_step[step] += vote
            for _ in range(settings.validate_batches):
                by_step[step] += validation
        if settings.checkpoint_dir and step % settings.checkpoint_every == 0:
            by_step[step] += dcp_save()
    return by_step


def hybrid_step(settings: Settings, stage: int, model: GPT) -> Traffic:
    """Return what a training step sends."""
    step = _data_axis(settings, model) + _microbatches(settings, stage, model)
    if settings.tensor_parallel > 1:
        step += norm_gradients(settings, len(model.blocks), is_last=model.head is not None)
    if settings.takes_norm:
        norms = FLOAT32_BYTES * len(list(model.parameters()))
        if settings.data_parallel * settings.tensor_parallel > 1:
            step[Message("all_reduce", norms)] += 1
        step[Message("all_reduce", FLOAT32_BYTES)] += settings.pipeline_parallel > 1
    return step


def _microbatches(
    settings: Settings, stage: int, model: GPT, *, is_training: bool = True
) -> Traffic:
    """Return the activations between stages and inside of layers."""
    positions = settings.context
    if settings.sequence_parallel:
        positions //= settings.tensor_parallel
    activation = settings.batch_size * positions * settings.width * FLOAT32_BYTES
    one = _crossings(settings, stage, activation, both_ways=is_training)
    if settings.tensor_parallel > 1:
        one += layer_messages(
            settings,
            settings.tensor_parallel,
            len(model.blocks),
            is_first=model.embedding is not None,
            is_last=model.head is not None,
            is_training=is_training,
        )
    microbatches = settings.microbatches_for(0)
    return Traffic({message: count * microbatches for message, count in one.items()})


def _crossings(settings: Settings, stage: int, num_bytes: int, *, both_ways: bool) -> Traffic:
    """Return one number, or one activation, over each border of the stage, and one back."""
    before, after = int(stage > 0), int(stage < settings.pipeline_parallel - 1)
    received, sent = (before + after, before + after) if both_ways else (before, after)
    return Traffic({Message("recv", num_bytes): received, Message("send", num_bytes): sent})


def _data_axis(settings: Settings, model: GPT, *, is_training: bool = True) -> Traffic:
    """Return the weights before the first microbatch and the gradients after the last."""
    shards = settings.data_parallel
    if shards == 1:
        return Traffic()
    axis = Traffic()
    for group in fsdp_groups(model):
        num_bytes = FLOAT32_BYTES * sum(
            part_size(_own_shape(name, shape, settings.tensor_parallel), shards)
            for name, shape in group.items()
        )
        axis[Message("all_gather_into_tensor", num_bytes)] += 1
        axis[Message("reduce_scatter_tensor", num_bytes * shards)] += is_training
    return axis


def _own_shape(name: str, shape: Sequence[int], ranks: int) -> Sequence[int]:
    """Return the shape of what the tensor axis leaves of a parameter to this rank."""
    if name.endswith(BY_COLUMNS):
        return [shape[0] // ranks, *shape[1:]]
    if name.endswith(BY_ROWS):
        return [shape[0], shape[1] // ranks]
    return shape
