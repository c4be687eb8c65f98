"""The world destroyed and made again, many times, with groups whose names come back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ledger import Ledger

TIMES = 10


def run(ledger: Ledger) -> None:
    x = torch.ones(11)
    for turn in range(TIMES):
        dist.barrier()
        ledger.did("barrier")
        dist.destroy_process_group()
        ledger.begin_world()
        # A name goes to other members each time; some ranks are in none of its groups.
        members = [turn % ledger.size, (turn + 1) % ledger.size]
        group = dist.new_group(members)
        if ledger.rank in members:
            dist.all_reduce(x, group=group)
            ledger.did("all_reduce", [x], [x], group=group, reduce="sum")
        for _ in range(turn % 3 + 1):
            dist.all_reduce(x)
            ledger.did("all_reduce", [x], [x], reduce="sum")
