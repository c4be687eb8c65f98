"""What tensor parallelism sends: the residual stream, four times for each layer and microbatch.

The sums over ranks: after attention and network in forward, before them in backward, and before
the head. With `sequence_parallel` each becomes a reduce_scatter and an all_gather, and embedding,
head and normalisations add some. DTensor issues both in their coalesced form, with one tensor.
"""

from __future__ import annotations

import dataclasses

from rankscope_trainer.model import VOCABULARY
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.dcp import dcp_load, dcp_save
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    STARTUP,
    Message,
    Traffic,
)

GATHER, SCATTER = "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    by_step = {STARTUP: dcp_load() if resumed_after else Traffic()}
    microbatches = settings.microbatches_for(world_size)
    training = Traffic()
    for _ in range(microbatches):
        training += layer_messages(settings, world_size, settings.layers)
    training += norm_gradients(settings, settings.layers)
    if settings.takes_norm:
        norms = FLOAT32_BYTES * len(list(build_model(settings).parameters()))
        training[Message("all_reduce", norms)] += 1
    # A validation batch passes in one piece.
    whole = dataclasses.replace(settings, batch_size=settings.batch_size * microbatches)
    validation = Traffic()
    for _ in range(settings.validate_batches):
        validation += layer_messages(whole, world_size, settings.layers, is_training=False)
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = Traffic(training)
        if settings.validate_every and step % settings.validate_every == 0:
            by_step[step] += validation
        if settings.checkpoint_dir and step % settings.checkpoint_every == 0:
            by_step[step] += dcp_save()
    return by_step


def layer_messages(
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


def norm_gradients(settings: Settings, layers: int, *, is_last: bool = True) -> Traffic:
    """Return the sums of the gradients of normalisations that saw only some positions."""
    if not settings.sequence_parallel:
        return Traffic()
    num_parameters = 2 * (2 * layers + is_last)
    return Traffic({Message("all_reduce", settings.width * FLOAT32_BYTES): num_parameters})
