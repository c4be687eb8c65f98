"""Object collectives: each is a few collectives of pickled bytes and their lengths."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from ledger import VERSION, Ledger, zeros

LENGTH = torch.int64


def run(ledger: Ledger) -> None:
    n, rank = ledger.size, ledger.rank
    things: list[Any] = [{"rank": who, "text": "x" * (10 * who + 1)} for who in range(n)]
    lengths = [len(pickle.dumps(thing)) for thing in things]
    mine, most = things[rank], max(lengths)

    dist.all_gather_object([None] * n, mine)
    one = zeros(8, LENGTH)
    if VERSION >= (2, 15):
        ledger.did("all_gather_into_tensor", [one], [zeros(8 * n, LENGTH)])
        ledger.did("all_gather_into_tensor", [zeros(most)], [zeros(n * most)])
    else:
        ledger.did("all_gather", [one], [one] * n)
        ledger.did("all_gather", [zeros(most)], [zeros(most)] * n)

    dist.gather_object(mine, [None] * n if rank == 1 else None, dst=1)
    ledger.did("all_gather", [one], [one] * n)
    ledger.did("gather", [zeros(most)], [zeros(most)] * (n if rank == 1 else 0), peer=1)

    dist.broadcast_object_list(things if rank == 2 else [None] * n, src=2)
    root = rank == 2
    ledger.did("broadcast", [zeros(8 * n, LENGTH)] * root, [zeros(8 * n, LENGTH)], peer=2)
    total = zeros(sum(lengths))
    ledger.did("broadcast", [total] * root, [total], peer=2)

    got: list[Any] = [None]
    dist.scatter_object_list(got, things if rank == 0 else None, src=0)
    assert got == [mine]
    root = rank == 0
    ledger.did("broadcast", [one] * root, [one], peer=0)
    ledger.did("scatter", [zeros(most)] * (n * root), [zeros(most)], peer=0)
    ledger.did("scatter", [one] * (n * root), [one], peer=0)

    if rank == 0:
        dist.send_object_list(things, dst=3)
        ledger.sent(zeros(8 * n, LENGTH), 3)
        ledger.sent(total, 3)
    elif rank == 3:
        dist.recv_object_list([None] * n, src=0)
        ledger.received(zeros(8 * n, LENGTH), 0)
        ledger.received(total, 0)
