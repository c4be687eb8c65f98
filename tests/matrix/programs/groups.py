"""Sub-groups, however made: each counts alone, roots are global ranks, members are named."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ledger import Ledger
from torch.distributed.device_mesh import init_device_mesh


def run(ledger: Ledger) -> None:
    rank, x = ledger.rank, torch.ones(10)
    group = dist.new_group([1, 3], group_desc="odd ones")
    if rank in (1, 3):
        for _ in range(3):
            _all_reduce(ledger, group)
        dist.broadcast(x, src=3, group=group)
        ledger.did("broadcast", [x] * (rank == 3), [x], group=group, peer=3)
    mine, _ = dist.new_subgroups(group_size=2)
    _all_reduce(ledger, mine)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    _all_reduce(ledger, mine)
    _same_members_twice(ledger)
    _mesh(ledger)
    _split(ledger)
    # Made by its members alone; last, because torch numbers later groups differently then.
    local = dist.new_group([0, 2], use_local_synchronization=True)
    if rank in (0, 2):
        _all_reduce(ledger, local)


def _all_reduce(ledger: Ledger, group: Any) -> None:
    x = torch.ones(4 + ledger.rank * 0)
    dist.all_reduce(x, group=group)
    ledger.did("all_reduce", [x], [x], group=group, reduce="sum")


def _same_members_twice(ledger: Ledger) -> None:
    """Two groups of the same ranks, used in turns, and one destroyed and made again."""
    first, second = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    for group in (first, second, first, second, second):
        _all_reduce(ledger, group)
    dist.destroy_process_group(first)
    _all_reduce(ledger, dist.new_group([0, 1, 2, 3]))


def _mesh(ledger: Ledger) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axis in ("dp", "tp", "dp"):
        _all_reduce(ledger, mesh[axis].get_group())


def _split(ledger: Ledger) -> None:
    try:
        group = dist.split_group(dist.group.WORLD, [[0, 1], [2, 3]])
    except (RuntimeError, ValueError):  # gloo cannot split: there is no such group to record
        return
    _all_reduce(ledger, group)
