"""send, recv, isend, irecv, from any source, batched; each pair and direction counts alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ledger import Ledger


def run(ledger: Ledger) -> None:
    _ring(ledger)
    _any_source(ledger)
    _batched(ledger)
    _in_a_subgroup(ledger)


def _ring(ledger: Ledger) -> None:
    rank, n = ledger.rank, ledger.size
    after, before = (rank + 1) % n, (rank - 1) % n
    given, got = torch.ones(50), torch.empty(50)
    for _ in range(2):
        if rank % 2 == 0:
            dist.send(given, dst=after)
            ledger.sent(given, after)
            dist.recv(got, src=before)
            ledger.received(got, before)
        else:
            dist.recv(got, src=before)
            ledger.received(got, before)
            dist.send(given, dst=after)
            ledger.sent(given, after)
    sending = dist.isend(given[:10], dst=after, tag=7)
    ledger.sent(given[:10], after)
    receiving = dist.irecv(got[:10], src=before, tag=7)
    ledger.received(got[:10], before)
    sending.wait()
    receiving.wait()


def _any_source(ledger: Ledger) -> None:
    got = torch.empty(6, dtype=torch.int16)
    if ledger.rank == 0:
        sources = []
        for _ in range(ledger.size - 1):
            sources.append(dist.recv(got, tag=5))
            ledger.received(got, -1)
        assert sorted(sources) == list(range(1, ledger.size))
    else:
        dist.send(got, dst=0, tag=5)
        ledger.sent(got, 0)


def _batched(ledger: Ledger) -> None:
    rank, n = ledger.rank, ledger.size
    after, before = (rank + 1) % n, (rank - 1) % n
    given, got = torch.ones(8), torch.empty(8)
    for _ in range(3):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, got, before)]
        )
        ledger.sent(given, after)
        ledger.received(got, before)
        for work in works:
            work.wait()


def _in_a_subgroup(ledger: Ledger) -> None:
    """Peers are global ranks also where the group counts otherwise."""
    group = dist.new_group([1, 3])
    if ledger.rank == 1:
        dist.send(torch.ones(3), dst=3, group=group)
        ledger.sent(torch.ones(3), 3, group=group)
    elif ledger.rank == 3:
        dist.recv(torch.ones(3), src=1, group=group)
        ledger.received(torch.ones(3), 1, group=group)
