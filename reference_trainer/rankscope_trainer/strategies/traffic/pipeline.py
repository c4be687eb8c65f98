"""What a pipeline sends.

Each microbatch crosses each border between two stages once forward and, in training, once
backward; only a border between two ranks is a message. So all schedules with the same stages send
the same, in another order.

The stages agree on how shapes are found by a vote of one number, down the line and back up: before
the first step, and at each change between training and validation.
"""

from __future__ import annotations

import itertools

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.placement import num_stages, rank_of_stage
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    INT64_BYTES,
    STARTUP,
    Message,
    Traffic,
)


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    vote = pipeline_vote(settings, rank, world_size)
    training = pipeline_step(settings, rank, world_size)
    validation = pipeline_step(settings, rank, world_size, is_training=False)
    by_step = {STARTUP: split_startup(settings, num_stages(settings, world_size))}
    must_vote = True
    for step in range(resumed_after + 1, settings.steps + 1):
        traffic = Traffic(training)
        if must_vote:
            traffic += vote
        if settings.takes_norm:
            traffic[Message("all_reduce", FLOAT32_BYTES)] += 1
        must_vote = bool(settings.validate_every) and step % settings.validate_every == 0
        if must_vote:
            traffic += vote
            for _ in range(settings.validate_batches):
                traffic += validation
        by_step[step] = traffic
    return by_step


def split_startup(settings: Settings, stages: int) -> Traffic:
    """Return rank 0's broadcast of a measured split: the layers of each stage."""
    is_measured = settings.balance == "profile" and not settings.stage_layers
    return Traffic([Message("broadcast", INT64_BYTES * stages)] if is_measured else [])


def pipeline_vote(settings: Settings, rank: int, world_size: int) -> Traffic:
    """Return the vote: one int32 over each border of this rank, and the result back."""
    sent, received = _borders(settings, rank, world_size)
    both_ways = sent + received
    return Traffic(
        {Message("recv", INT32_BYTES): both_ways, Message("send", INT32_BYTES): both_ways}
    )


def pipeline_step(
    settings: Settings, rank: int, world_size: int, *, is_training: bool = True
) -> Traffic:
    """Return the activations (and gradients) of one pass of all microbatches."""
    microbatches = settings.microbatches_for(world_size)
    activation = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
    sent, received = _borders(settings, rank, world_size)
    if is_training:
        sent = received = sent + received
    return Traffic(
        {
            Message("recv", activation): received * microbatches,
            Message("send", activation): sent * microbatches,
        }
    )


def _borders(settings: Settings, rank: int, world_size: int) -> tuple[int, int]:
    """Count the borders over which a rank passes activations on, and receives them."""
    ranks = [
        rank_of_stage(settings, stage, world_size)
        for stage in range(num_stages(settings, world_size))
    ]
    borders = [(before, after) for before, after in itertools.pairwise(ranks) if before != after]
    return [b for b, _ in borders].count(rank), [a for _, a in borders].count(rank)
