"""Handles of asynchronous work: waited late, out of order, twice, elsewhere, or never."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from ledger import Ledger


def run(ledger: Ledger) -> None:
    works = []
    for size in range(1, 7):
        x = torch.ones(size)
        works.append(dist.all_reduce(x, async_op=True))
        ledger.did("all_reduce", [x], [x], reduce="sum", is_async=True)
    for work in reversed(works):
        work.wait()
        work.wait()
    _polled(ledger)
    _elsewhere(ledger)
    _mixed(ledger)


def _polled(ledger: Ledger) -> None:
    """Never waited for, only asked whether it is done."""
    x = torch.ones(30)
    work = dist.all_reduce(x, async_op=True)
    ledger.did("all_reduce", [x], [x], reduce="sum", waited="nobody", is_async=True)
    _until_done(work)
    given, mine = torch.ones(ledger.size * 3), torch.empty(3)
    work = dist.reduce_scatter_tensor(mine, given, async_op=True)
    ledger.did(
        "reduce_scatter_tensor", [given], [mine], reduce="sum", waited="nobody", is_async=True
    )
    dist.barrier()
    ledger.did("barrier")
    assert not work.is_completed()  # gloo finishes this one only inside wait()


def _until_done(work: Any) -> None:
    deadline = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _elsewhere(ledger: Ledger) -> None:
    """Issued in one thread, waited for in another."""
    x = torch.ones(40)
    works = [dist.all_reduce(x, async_op=True)]
    ledger.did("all_reduce", [x], [x], reduce="sum", is_async=True)
    thread = threading.Thread(target=lambda: works[0].wait())
    thread.start()
    thread.join()


def _mixed(ledger: Ledger) -> None:
    """Sends and collectives in flight together, finished in another order."""
    rank, n, x = ledger.rank, ledger.size, torch.ones(5)
    got, after, before = torch.empty(5), (rank + 1) % n, (rank - 1) % n
    receiving = dist.irecv(got, src=before)
    ledger.received(got, before)
    reducing = dist.all_reduce(x, async_op=True)
    ledger.did("all_reduce", [x], [x], reduce="sum", is_async=True)
    sending = dist.isend(torch.ones(5), dst=after)
    ledger.sent(torch.ones(5), after)
    sending.wait()
    reducing.wait()
    receiving.wait()
