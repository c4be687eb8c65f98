"""Pipelining: GPipe over four stages, activations down and gradients up, once per microbatch."""

from __future__ import annotations

import torch
from ledger import VERSION, Ledger, zeros
from torch import nn

WIDTH, MICROBATCHES, BATCH = 6, 4, 12


def skipped() -> str:
    if (2, 7) <= VERSION < (2, 13):
        return (
            "pipelining fails on gloo in this PyTorch, also without the agent: "
            "its stages greet their neighbours with 8 bytes into a tensor of 4"
        )
    return ""


def run(ledger: Ledger) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, n = ledger.rank, ledger.size
    torch.manual_seed(0)
    device = torch.device("cpu")
    shape = (BATCH // MICROBATCHES, WIDTH)
    example = torch.ones(shape, requires_grad=True)
    given = example if rank else torch.ones(shape)
    stage = PipelineStage(
        nn.Linear(WIDTH, WIDTH), rank, n, device, input_args=(given,), output_args=(example,)
    )
    schedule = ScheduleGPipe(
        stage, MICROBATCHES, loss_fn=lambda output, target: (output - target).pow(2).sum()
    )
    for step in range(2):
        if rank == 0:
            schedule.step(torch.ones(BATCH, WIDTH))
        elif rank == n - 1:
            schedule.step(target=torch.zeros(BATCH, WIDTH))
        else:
            schedule.step()
        _did(ledger, example, first=step == 0)


def _did(ledger: Ledger, x: torch.Tensor, *, first: bool) -> None:
    rank, last = ledger.rank, ledger.size - 1
    if first and VERSION >= (2, 15):
        _meet(ledger)
    elif first and VERSION >= (2, 13):
        _vote(ledger)
    for _ in range(MICROBATCHES):  # forward
        if rank > 0:
            ledger.received(x, rank - 1)
        if rank < last:
            ledger.sent(x, rank + 1)
    for _ in range(MICROBATCHES):  # backward
        if rank < last:
            ledger.received(x, rank + 1)
        if rank > 0:
            ledger.sent(x, rank - 1)


def _vote(ledger: Ledger) -> None:
    """How shapes are found is agreed on by one number, down the line and back up."""
    rank, last, vote = ledger.rank, ledger.size - 1, zeros(4, torch.int32)
    if rank > 0:
        ledger.received(vote, rank - 1)
    if rank < last:
        ledger.sent(vote, rank + 1)
        ledger.received(vote, rank + 1)
    if rank > 0:
        ledger.sent(vote, rank - 1)


def _meet(ledger: Ledger) -> None:
    """The vote is an all_reduce, and neighbours connect in two rounds: even pairs, odd pairs."""
    vote = zeros(4, torch.int32)
    ledger.did("all_reduce", [vote], [vote], reduce="min")
    for parity in (0, 1):
        for lower in range(parity, ledger.size - 1, 2):
            if ledger.rank == lower:
                ledger.sent(vote, lower + 1)
            elif ledger.rank == lower + 1:
                ledger.received(vote, lower)
        ledger.did("all_reduce", [vote], [vote], reduce="sum")
