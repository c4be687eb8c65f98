"""What DDP sends.

DDP's constructor compares the number of parameters (all_gather) and their shapes (broadcast), and
sends rank 0's weights to all (broadcast, in pieces of 250 MiB). In the first step it reduces all
gradients as one bucket. As the second step begins it forms buckets in the order in which the
gradients became ready, and rank 0 tells the others the order and the sizes (two broadcasts).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import (
    INT32_BYTES,
    INT64_BYTES,
    MIB,
    STARTUP,
    Message,
    Traffic,
)

DDP_BROADCAST_BYTES = 250 * MIB  # `broadcast_bucket_size` of DistributedDataParallel


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
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
