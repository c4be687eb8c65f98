"""What a pipeline sends.

Its stages agree on how shapes are found by a vote of one number, down the line and back up: before
the first step, and at each change between training and validation.
"""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    vote = pipeline_vote(rank, world_size)
    training = pipeline_step(settings, rank, world_size)
    validation = pipeline_step(settings, rank, world_size, is_training=False)
    by_step = {STARTUP: Traffic()}
    must_vote = True
    for step in range(resumed_after + 1, settings.steps + 1):
        traffic = Traffic(training)
        if must_vote:
            traffic += vote
        if settings.clip or settings.gradient_norm:
            traffic[Message("all_reduce", FLOAT32_BYTES)] += 1
        must_vote = bool(settings.validate_every) and step % settings.validate_every == 0
        if must_vote:
            traffic += vote
            for _ in range(settings.validate_batches):
                traffic += validation
        by_step[step] = traffic
    return by_step


def pipeline_vote(rank: int, world_size: int) -> Traffic:
    """Return the vote: one int32 from the stage before to the one after, and the result back."""
    neighbours = _has_previous(rank) + _has_next(rank, world_size)
    number = INT32_BYTES
    return Traffic({Message("recv", number): neighbours, Message("send", number): neighbours})


def pipeline_step(
    settings: Settings, rank: int, world_size: int, *, is_training: bool = True
) -> Traffic:
    """Return the activations (and gradients) of one pass of all microbatches.

    Both schedules send the same, in another order: each microbatch crosses each border between
    two stages once forward and, in training, once backward.
    """
    microbatches = settings.microbatches_for(world_size)
    activation = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
    before, after = _has_previous(rank), _has_next(rank, world_size)
    received, sent = (before + after, before + after) if is_training else (before, after)
    return Traffic(
        {
            Message("recv", activation): received * microbatches,
            Message("send", activation): sent * microbatches,
        }
    )


def _has_previous(rank: int) -> int:
    return int(rank > 0)


def _has_next(rank: int, world_size: int) -> int:
    return int(rank < world_size - 1)
