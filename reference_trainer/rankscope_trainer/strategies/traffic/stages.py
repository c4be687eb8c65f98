"""What strategies send whose ranks hold stages: pipeline, model_parallel, pipedream."""

from __future__ import annotations

import itertools

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.stages.placement import num_stages, rank_of_stage
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    INT64_BYTES,
    STARTUP,
    Message,
    Traffic,
    each_step,
    is_saved,
    is_validated,
)


def pipeline(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank of a pipeline sends, by step.

    Each microbatch crosses each border between two stages once forward and, in training, once
    backward; only a border between two ranks is a message. So all schedules with the same stages
    send the same, in another order.

    The stages agree on how shapes are found by a vote of one number, down the line and back up:
    before the first step, and at each change between training and validation.
    """
    microbatches = settings.microbatches_for(world_size)
    activation = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
    sent, received = _borders(settings, rank, world_size)
    both_ways = sent + received
    return each_step(
        settings,
        resumed_after,
        _passes(activation, both_ways * microbatches, both_ways * microbatches) + _norm(settings),
        startup=_split(settings, num_stages(settings, world_size)),
        validation=_passes(activation, sent * microbatches, received * microbatches),
        vote=_passes(INT32_BYTES, both_ways, both_ways),
    )


def model_parallel(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank sends: the whole batch over each border, once forward, once backward."""
    sequences = settings.batch_size * settings.microbatches_for(world_size)
    activation = sequences * settings.context * settings.width * FLOAT32_BYTES
    before, after = int(rank > 0), int(rank < world_size - 1)
    return each_step(
        settings,
        resumed_after,
        _passes(activation, before + after, before + after) + _norm(settings),
        startup=_split(settings, world_size),
        validation=_passes(activation, after, before),
    )


def pipedream(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a stage sends: an activation forward and a gradient back for each microbatch.

    While the pipeline fills, a stage has forwards without backwards; before a checkpoint and after
    the last step it makes up for them.
    """
    microbatches = settings.microbatches_for(world_size)
    activation = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
    before, after, ahead = rank > 0, rank < world_size - 1, world_size - 1 - rank
    in_flight = 0
    by_step = {STARTUP: Traffic()}
    for step in range(resumed_after + 1, settings.steps + 1):
        begun = in_flight + microbatches
        runs_empty = is_saved(settings, step) or step == settings.steps
        in_flight = 0 if runs_empty else min(begun, ahead)
        forwards, backwards = microbatches, begun - in_flight
        if is_validated(settings, step):
            forwards += microbatches * settings.validate_batches
        sent = after * forwards + before * backwards
        received = before * forwards + after * backwards
        by_step[step] = _passes(activation, sent, received)
    return by_step


def _passes(num_bytes: int, sent: int, received: int) -> Traffic:
    return Traffic({Message("send", num_bytes): sent, Message("recv", num_bytes): received})


def _norm(settings: Settings) -> Traffic:
    """Return the sum of squares over all stages, where the norm is taken."""
    return Traffic([Message("all_reduce", FLOAT32_BYTES)] if settings.takes_norm else [])


def _split(settings: Settings, stages: int) -> Traffic:
    """Return rank 0's broadcast of a measured split: the layers of each stage."""
    is_measured = settings.balance == "profile" and not settings.stage_layers
    return Traffic([Message("broadcast", INT64_BYTES * stages)] if is_measured else [])


def _borders(settings: Settings, rank: int, world_size: int) -> tuple[int, int]:
    """Count the borders over which a rank passes activations on, and receives them."""
    ranks = [
        rank_of_stage(settings, stage, world_size)
        for stage in range(num_stages(settings, world_size))
    ]
    borders = [(before, after) for before, after in itertools.pairwise(ranks) if before != after]
    return [b for b, _ in borders].count(rank), [a for _, a in borders].count(rank)
