"""What strategies send whose tensors are cut apart over ranks: fsdp, tensor, hybrid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from rankscope_trainer.model import GPT, VOCABULARY
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    INT64_BYTES,
    NOTHING,
    Message,
    Traffic,
    each_step,
)

PICKLED_BYTES = -1  # of a pickled object: some number, not the same for each run
NONE_BYTES = 4  # of a pickled None
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GATHER, SCATTER = "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"
BY_COLUMNS = (
    "project_in.weight",
    "project_in.bias",
    "network.0.weight",
    "network.0.bias",
    "head.project.weight",
)
BY_ROWS = ("project_out.weight", "network.2.weight")


def fsdp(settings: Settings, rank: int, world_size: int, resumed_after: int) -> dict[int, Traffic]:
    """Return what a rank of FSDP2 sends, by step.

    The weights of a group before they are used, its gradient after the backward. Each block is a
    group, and so is what is outside of the blocks. A rank's part of a tensor is cut along the first
    dimension and filled up so that all parts are equally large.
    """
    return each_step(
        settings,
        resumed_after,
        _fsdp_step(settings, world_size),
        startup=_dcp_load() if resumed_after else NOTHING,
        validation=_fsdp_gathers(settings, world_size),
        saving=_dcp_save(),
    )


def tensor(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank sends: the residual stream, four times for each layer and microbatch.

    The sums over ranks: after attention and network in forward, before them in backward, and before
    the head. With `sequence_parallel` each becomes a reduce_scatter and an all_gather, and
    embedding, head and normalisations add some. DTensor issues both in their coalesced form, with
    one tensor.
    """
    microbatches = settings.microbatches_for(world_size)
    training = _norm_gradients(settings, settings.layers)
    for _ in range(microbatches):
        training += _layer_messages(settings, world_size, settings.layers)
    if settings.takes_norm:
        norms = FLOAT32_BYTES * len(list(build_model(settings).parameters()))
        training[Message("all_reduce", norms)] += 1
    # A validation batch passes in one piece.
    whole = dataclasses.replace(settings, batch_size=settings.batch_size * microbatches)
    return each_step(
        settings,
        resumed_after,
        training,
        startup=_dcp_load() if resumed_after else NOTHING,
        validation=_layer_messages(whole, world_size, settings.layers, is_training=False),
        saving=_dcp_save(),
    )


def hybrid(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank sends: each part of the parallelism on its own axis of the mesh."""
    stage = rank // settings.tensor_parallel % settings.pipeline_parallel
    model = build_model(settings).keep_stage(stage, settings.pipeline_parallel)
    validation = _data_axis(settings, model, is_training=False)
    validation += _microbatches(settings, stage, model, is_training=False)
    return each_step(
        settings,
        resumed_after,
        _hybrid_step(settings, stage, model),
        startup=_dcp_load() if resumed_after else NOTHING,
        validation=validation,
        saving=_dcp_save(),
        vote=_crossings(settings, stage, INT32_BYTES, both_ways=True),
    )


def _fsdp_step(settings: Settings, world_size: int) -> Traffic:
    """Return what a training step sends."""
    microbatches = settings.microbatches_by_rank(world_size)[0]  # all have equally many
    step = Traffic()
    for _ in range(microbatches):
        step += _fsdp_gathers(settings, world_size)
        # Once more for backward, but the outermost weights have stayed.
        step += _fsdp_gathers(settings, world_size, blocks_only=True)
    shards = world_size // settings.replicas
    for part in _parts(settings, shards):
        step[Message("reduce_scatter_tensor", part * shards * FLOAT32_BYTES)] += 1
        if settings.replicas > 1:
            step[Message("all_reduce", part * FLOAT32_BYTES)] += 1
    if settings.takes_norm:
        norms = FLOAT32_BYTES * len(list(build_model(settings).parameters()))
        step[Message("all_reduce", norms)] += 1
    return step


def _fsdp_gathers(settings: Settings, world_size: int, *, blocks_only: bool = False) -> Traffic:
    """Return the all_gathers of one pass through the model."""
    size = WEIGHT_BYTES[settings.precision]
    parts = _parts(settings, world_size // settings.replicas)
    return Traffic(
        Message("all_gather_into_tensor", part * size)
        for part in (parts[:-1] if blocks_only else parts)
    )


def _fsdp_groups(model: GPT) -> list[dict[str, torch.Size]]:
    """Return the parameters of each block, then those outside: names and shapes."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    inside = [
        {name: shapes[name] for name in shapes if name.startswith(f"blocks.{layer}.")}
        for layer in model.blocks
    ]
    return [*inside, {name: shapes[name] for name in shapes if not name.startswith("blocks.")}]


def _part_size(shape: Sequence[int], shards: int) -> int:
    """Return the numbers in one rank's part of a tensor, filled up."""
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def _parts(settings: Settings, shards: int) -> list[int]:
    """Return the numbers in one rank's part of each group."""
    return [
        sum(_part_size(shape, shards) for shape in group.values())
        for group in _fsdp_groups(build_model(settings))
    ]


def _layer_messages(
    settings: Settings,
    ranks: int,
    layers: int,
    *,
    is_first: bool = True,
    is_last: bool = True,
    is_training: bool = True,
) -> Traffic:
    """Return what one microbatch causes in a stage with `layers` layers.

    `is_first`: the embedding is there; `is_last`: the head is.
    """
    positions = settings.batch_size * settings.context * FLOAT32_BYTES
    stream, scores = positions * settings.width, positions * VOCABULARY // ranks
    summed = 2 * layers
    backwards = 2 * layers + is_last if is_training else 0
    sent = Traffic({Message(GATHER, scores): int(is_last)})
    if not settings.sequence_parallel:
        return sent + Traffic({Message("all_reduce", stream): summed + backwards})
    before = 2 * layers + is_last  # what is computed from all positions
    after = 2 * layers + is_first if is_training else 0
    sent[Message(GATHER, stream // ranks)] += before + after
    return sent + Traffic({Message(SCATTER, stream): summed + backwards})


def _norm_gradients(settings: Settings, layers: int, *, is_last: bool = True) -> Traffic:
    """Return the sums of the gradients of normalisations that saw only some positions."""
    if not settings.sequence_parallel:
        return Traffic()
    num_parameters = 2 * (2 * layers + is_last)
    return Traffic({Message("all_reduce", settings.width * FLOAT32_BYTES): num_parameters})


def _hybrid_step(settings: Settings, stage: int, model: GPT) -> Traffic:
    """Return what a training step sends."""
    step = _data_axis(settings, model) + _microbatches(settings, stage, model)
    if settings.tensor_parallel > 1:
        step += _norm_gradients(settings, len(model.blocks), is_last=model.head is not None)
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
    microbatch = _crossings(settings, stage, activation, both_ways=is_training)
    if settings.tensor_parallel > 1:
        microbatch += _layer_messages(
            settings,
            settings.tensor_parallel,
            len(model.blocks),
            is_first=model.embedding is not None,
            is_last=model.head is not None,
            is_training=is_training,
        )
    microbatches = settings.microbatches_for(0)
    return Traffic({message: count * microbatches for message, count in microbatch.items()})


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
    for group in _fsdp_groups(model):
        num_bytes = FLOAT32_BYTES * sum(
            _part_size(_own_shape(name, shape, settings.tensor_parallel), shards)
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


# A sharded checkpoint sends plans of which rank writes or reads what, no weights. The plans are
# pickled Python objects whose size is not computed here; their number is exact, and so are the
# sizes that are sent before them.


def _dcp_save() -> Traffic:
    """Return one `save`: plans to rank 0 and back, lists of what was written likewise."""
    return _gather() + _scatter() + _gather() + _broadcast()


def _dcp_load() -> Traffic:
    """Return one `load`: plans to rank 0 and back, then each reports to all that it is done."""
    done = Traffic({Message("all_gather", INT64_BYTES): 1, Message("all_gather", NONE_BYTES): 1})
    return _gather() + _scatter() + done


def _gather() -> Traffic:
    return Traffic({Message("all_gather", INT64_BYTES): 1, Message("gather", PICKLED_BYTES): 1})


def _scatter() -> Traffic:
    sizes = {Message("broadcast", INT64_BYTES): 1, Message("scatter", INT64_BYTES): 1}
    return Traffic({**sizes, Message("scatter", PICKLED_BYTES): 1})


def _broadcast() -> Traffic:
    return Traffic({Message("broadcast", INT64_BYTES): 1, Message("broadcast", PICKLED_BYTES): 1})
