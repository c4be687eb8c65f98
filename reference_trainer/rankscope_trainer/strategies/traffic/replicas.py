"""What strategies send whose ranks each hold the whole model: ddp, ring, local_sgd, hogwild."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.comm_hooks import PLAIN_STEPS
from rankscope_trainer.strategies.float8 import SCALE_BYTES, piece_length
from rankscope_trainer.strategies.hogwild import NAME_BYTES
from rankscope_trainer.strategies.ring import padded_length
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT32_BYTES,
    INT64_BYTES,
    MIB,
    STARTUP,
    Message,
    Traffic,
    each_step,
    is_saved,
)
from rankscope_trainer.strategies.tree import ROOT, children
from rankscope_trainer.strategies.uneven import last_steps

DDP_BROADCAST_BYTES = 250 * MIB  # `broadcast_bucket_size` of DistributedDataParallel


def ddp(settings: Settings, rank: int, world_size: int, resumed_after: int) -> dict[int, Traffic]:
    """Return what a rank of DDP sends, by step.

    DDP's constructor compares the number of parameters (all_gather) and their shapes (broadcast),
    and sends rank 0's weights to all (broadcast, in pieces of 250 MiB). In the first step it
    reduces all gradients as one bucket. As the second step begins it forms buckets in the order in
    which the gradients became ready, and rank 0 sends the others order and sizes (two broadcasts).
    A communication hook changes what the reductions carry, uneven data how often ranks must agree.
    Where the model has buffers, rank 0 sends them in the forward after each reduction; where a
    rank may lack data, all agree before on which ranks have them.
    """
    model = build_model(settings)
    buckets = gradient_buckets(model, settings.bucket_mib)
    whole = [list(model.parameters())]  # before DDP regroups: everything as one bucket
    startup = ddp_constructor(model)
    for is_warmed_up in (settings.static_graph, bool(resumed_after)):
        if is_warmed_up:
            startup += reduction(settings, whole, world_size, is_plain=True) + ddp_buffers(model)
    if settings.static_graph:  # which parameters were used, found out once
        startup[Message("all_reduce", INT32_BYTES * len(whole[0]))] += 1
    by_step = {STARTUP: startup}
    regroups = resumed_after + 1 if resumed_after else 2
    for step in range(resumed_after + 1, settings.steps + 1):
        reductions = step + settings.static_graph  # including this one, without the warm-up
        groups = whole if step < regroups else buckets
        by_step[step] = reduction(settings, groups, world_size, is_plain=reductions <= PLAIN_STEPS)
        by_step[step] += ddp_buffers(model)
    if regroups in by_step:
        by_step[regroups] += ddp_regrouping(model, len(buckets))
    if settings.uneven_ratio:
        return mirrored(settings, by_step, rank, world_size)
    return by_step


def mirrored(
    settings: Settings, by_step: dict[int, Traffic], rank: int, world_size: int
) -> dict[int, Traffic]:
    """Return the same with what `join` adds: all belongs to the last step in which a rank trains.

    Before each forward all ranks count those that still have a batch, and inform those that do not
    whether this backward will reduce. Those without one mirror both and the reductions. In the end
    they count once more, find out which was the last, and get that rank's weights.
    """
    asked = {Message("all_reduce", FLOAT32_BYTES): 2 * settings.microbatches_for(world_size)}
    if settings.mask_buffer:  # whose buffers count
        asked[Message("all_reduce", INT64_BYTES)] = 1
    own_last = last_steps(settings, world_size)[rank]
    with_join: dict[int, Traffic] = {}
    for step, sent in by_step.items():
        if step == STARTUP:
            with_join[step] = sent
        else:
            with_join.setdefault(min(step, own_last), Traffic()).update(sent + Traffic(asked))
    end = [Message("all_reduce", FLOAT32_BYTES), Message("all_reduce", INT64_BYTES)]
    with_join[max(with_join)].update(Traffic(end) + ddp_weights(build_model(settings)))
    return with_join


def ddp_constructor(model: GPT) -> Traffic:
    """Return what `DistributedDataParallel(model)` sends."""
    # For each parameter the sizes and the strides of its dimensions.
    shapes = sum(2 * parameter.dim() for parameter in model.parameters())
    compared = [Message("all_gather", INT64_BYTES), Message("broadcast", INT64_BYTES * shapes)]
    return Traffic(compared) + ddp_weights(model)


def ddp_weights(model: GPT) -> Traffic:
    """Return the weights of one rank on their way to all others."""
    pieces = _fill_buckets(list(model.parameters()), DDP_BROADCAST_BYTES)
    weights = Traffic(Message("broadcast", _num_bytes(piece)) for piece in pieces)
    return weights + ddp_buffers(model)


def ddp_buffers(model: GPT) -> Traffic:
    """Return the buffers of one rank on their way to all others."""
    size = sum(buffer.nbytes for buffer in model.buffers())
    return Traffic([Message("broadcast", size)] if size else [])


def ddp_regrouping(model: GPT, buckets: int) -> Traffic:
    """Return what rank 0 sends the others once, as it forms the buckets."""
    indices = len(list(model.parameters())) + 1  # one for each parameter, and their number
    return Traffic(
        [
            Message("broadcast", INT32_BYTES * indices),
            Message("broadcast", INT32_BYTES * buckets),
        ]
    )


def gradient_buckets(model: GPT, bucket_mib: float) -> list[list[Parameter]]:
    """Return the parameters of each bucket, once DDP has regrouped them."""
    return _fill_buckets(gradient_order(model), int(bucket_mib * MIB))


def reduction(
    settings: Settings, buckets: list[list[Parameter]], world_size: int, *, is_plain: bool
) -> Traffic:
    """Return the reductions of a step; `is_plain` while fp8 and PowerSGD do not compress yet."""
    if settings.comm_hook == "fp8" and not is_plain:
        parts = (float8_reduction(bucket, world_size) for bucket in buckets)
        return sum(parts, Traffic())
    if settings.comm_hook == "powersgd" and not is_plain:
        parts = (powersgd_reduction(bucket, settings.powersgd_rank) for bucket in buckets)
        return sum(parts, Traffic())
    is_half = settings.comm_hook in ("fp16", "bf16")
    return Traffic(
        Message("all_reduce", _num_bytes(bucket) // (2 if is_half else 1)) for bucket in buckets
    )


def float8_reduction(bucket: list[Parameter], world_size: int) -> Traffic:
    """Return a byte for each number, and a scale for each piece: to who adds it up, and back."""
    length = piece_length(sum(parameter.numel() for parameter in bucket), world_size)
    message = SCALE_BYTES + length
    return Traffic(
        [
            Message("all_to_all_single", world_size * message),
            Message("all_gather", message),
        ]
    )


def powersgd_reduction(bucket: list[Parameter], columns: int) -> Traffic:
    """Return PowerSGD's three reductions: what it leaves as it is, all Ps, all Qs."""
    plain = ps = qs = 0
    for parameter in bucket:
        n, m = len(parameter), parameter.numel() // len(parameter)
        rank = min(n, m, columns)
        if 2 * rank * (n + m) < n * m:  # it must save at least half
            ps, qs = ps + rank * n, qs + rank * m
        else:
            plain += parameter.numel()
    return Traffic(Message("all_reduce", FLOAT32_BYTES * numbers) for numbers in (plain, ps, qs))


def gradient_order(model: GPT) -> list[Parameter]:
    """Return the parameters in the order in which a backward completes their gradients."""
    order: list[Parameter] = []
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


def _fill_buckets(parameters: Sequence[Parameter], limit: int) -> list[list[Parameter]]:
    """Return DDP's buckets: one is full as soon as it holds `limit` bytes."""
    buckets: list[list[Parameter]] = [[]]
    for parameter in parameters:
        if _num_bytes(buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def _num_bytes(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def ring(settings: Settings, rank: int, world_size: int, resumed_after: int) -> dict[int, Traffic]:
    """Return what a rank sends: the gradient, in as many pieces as there are ranks, or whole.

    In a tree as often as it has neighbours there: once up, and once down.
    """
    numbers = padded_length(sum(p.numel() for p in build_model(settings).parameters()), world_size)
    num_bytes = numbers * FLOAT32_BYTES
    pieces = 2 * (world_size - 1)
    training = Traffic(
        {Message(name, num_bytes // world_size): pieces for name in ("send", "recv")}
    )
    if settings.reduce_with == "tree":
        neighbours = len(children(rank, world_size)) + (rank != ROOT)
        training = Traffic({Message(name, num_bytes): neighbours for name in ("send", "recv")})
    if settings.reduce_with == "library":
        training = Traffic([Message("all_reduce", num_bytes)])
    return each_step(settings, resumed_after, training)


def local_sgd(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank sends: the weights, in each step with an average, and nothing else."""
    weights = sum(parameter.nbytes for parameter in build_model(settings).parameters())
    by_step = each_step(settings, resumed_after, Traffic())
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step][Message("all_reduce", weights)] += step % settings.average_every == 0
    return by_step


def hogwild(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what a rank sends: the name of the memory, once, but never weights or gradients.

    A barrier each ends the start-up, the last step, and the loading of a checkpoint; before a
    checkpoint is another one.
    """
    barrier = Message("barrier", 0)
    barriers = 2 + bool(resumed_after)  # the file is mapped, the weights are there
    startup = Traffic({Message("broadcast", NAME_BYTES): 1, barrier: barriers})
    by_step = each_step(settings, resumed_after, Traffic(), startup=startup)
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step][barrier] += is_saved(settings, step) + (step == settings.steps)
    return by_step
