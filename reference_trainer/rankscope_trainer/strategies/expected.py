"""Exactly what each rank sends and receives, computed from the settings alone.

Nothing here starts a process group. A test compares these numbers with what a run really did;
they hold for PyTorch 2.13. The size of a message is that of the tensor which this rank hands
over (`recv`: that it receives into), as all_gather's input and not its output.

What happens once, beside the steps:

- DDP's constructor compares the number of parameters (all_gather) and their shapes (broadcast),
  and sends rank 0's weights to all (broadcast, in pieces of 250 MiB).
- In the first step, DDP reduces all gradients as one bucket. As the second step begins it forms
  buckets in the order in which the gradients became ready, and rank 0 tells the others the order
  and the sizes (two broadcasts).
- A pipeline's stages agree on how shapes are found by a vote of one number, down the line and
  back up: before the first step, and at each change between training and validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model

STARTUP = 0  # stands for the time before the first step, where a step is asked for
INT32_BYTES, INT64_BYTES, FLOAT32_BYTES = 4, 8, 4
MIB = 1 << 20
DDP_BROADCAST_BYTES = 250 * MIB  # `broadcast_bucket_size` of DistributedDataParallel


class Message(NamedTuple):
    """One operation of a rank: its name and the bytes that it hands over or receives."""

    operation: str
    num_bytes: int


Traffic: TypeAlias = Counter[Message]  # how often each message occurs


def expected_traffic(
    settings: Settings, *, rank: int, world_size: int, resumed_after: int = 0
) -> dict[int, Traffic]:
    """Return the traffic of one rank by step, from `STARTUP` to the last step of the settings.

    What a rank does at the end of a step, validation and checkpoint, belongs to that step.
    """
    if settings.strategy == "ddp":
        by_step = _ddp(settings, resumed_after)
    else:
        by_step = _pipeline(settings, rank, world_size, resumed_after)
    if settings.checkpoint_dir:
        if settings.resume:
            by_step[STARTUP][Message("broadcast", INT64_BYTES)] += 1  # the step to go on from
        for step in range(resumed_after + 1, settings.steps + 1):
            by_step[step][Message("barrier", 0)] += step % settings.checkpoint_every == 0
    return {step: +traffic for step, traffic in by_step.items()}  # `+` drops counts of 0


def total_traffic(by_step: dict[int, Traffic]) -> Traffic:
    """Return the traffic of a whole run."""
    return sum(by_step.values(), Traffic())


def ddp_constructor(model: GPT) -> Traffic:
    """Return what `DistributedDataParallel(model)` sends."""
    parameters = list(model.parameters())
    # For each parameter the sizes and the strides of its dimensions.
    shapes = sum(2 * parameter.dim() for parameter in parameters)
    weights = _fill_buckets([p.nbytes for p in parameters], DDP_BROADCAST_BYTES)
    return Traffic(
        [
            Message("all_gather", INT64_BYTES),
            Message("broadcast", INT64_BYTES * shapes),
            *(Message("broadcast", num_bytes) for num_bytes in weights),
        ]
    )


def ddp_first_step(model: GPT) -> Traffic:
    """Return the reduction of the first backward: everything as one bucket."""
    return Traffic([Message("all_reduce", sum(p.nbytes for p in model.parameters()))])


def ddp_regrouping(model: GPT, bucket_mib: float) -> Traffic:
    """Return what rank 0 tells the others once, as the second step begins."""
    indices = len(list(model.parameters())) + 1  # one for each parameter, and their number
    buckets = sum(ddp_step(model, bucket_mib).values())
    return Traffic(
        [
            Message("broadcast", INT32_BYTES * indices),
            Message("broadcast", INT32_BYTES * buckets),
        ]
    )


def ddp_step(model: GPT, bucket_mib: float) -> Traffic:
    """Return the reductions of every later step: one for each bucket."""
    ready = [parameter.nbytes for parameter in gradient_order(model)]
    buckets = _fill_buckets(ready, int(bucket_mib * MIB))
    return Traffic(Message("all_reduce", num_bytes) for num_bytes in buckets)


def gradient_order(model: GPT) -> list[torch.nn.Parameter]:
    """Return the parameters in the order in which a backward completes their gradients."""
    order: list[torch.nn.Parameter] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(order.append)
        for parameter in model.parameters()
    ]
    blank = torch.zeros((1, 1), dtype=torch.long)
    next_byte_loss(model(blank), blank).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad(set_to_none=True)
    return order


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


def _ddp(settings: Settings, resumed_after: int) -> dict[int, Traffic]:
    model = build_model(settings)
    first, later = ddp_first_step(model), ddp_step(model, settings.bucket_mib)
    startup = ddp_constructor(model)
    if resumed_after:
        startup += first  # the warm-up takes the place of the first step
    by_step = {STARTUP: startup}
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = Traffic(first if step == 1 else later)
    regroups = resumed_after + 1 if resumed_after else 2
    if regroups in by_step:
        by_step[regroups] += ddp_regrouping(model, settings.bucket_mib)
    return by_step


def _pipeline(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    vote = pipeline_vote(rank, world_size)
    training = pipeline_step(settings, rank, world_size)
    validation = pipeline_step(settings, rank, world_size, is_training=False)
    by_step = {STARTUP: Traffic()}
    must_vote = True
    for step in range(resumed_after + 1, settings.steps + 1):
        traffic = Traffic(training)
        if must_vote:
            traffic += vote
        if settings.clip:
            traffic[Message("all_reduce", FLOAT32_BYTES)] += 1
        must_vote = bool(settings.validate_every) and step % settings.validate_every == 0
        if must_vote:
            traffic += vote
            for _ in range(settings.validate_batches):
                traffic += validation
        by_step[step] = traffic
    return by_step


def _fill_buckets(sizes: Iterable[int], limit: int) -> Sequence[int]:
    """Return the sizes of DDP's buckets: one is full as soon as it holds `limit` bytes."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= limit:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def _has_previous(rank: int) -> int:
    return int(rank > 0)


def _has_next(rank: int, world_size: int) -> int:
    return int(rank < world_size - 1)
