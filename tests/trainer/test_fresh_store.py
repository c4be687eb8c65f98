"""Ranks of one attempt find each other in a store that is full of what dead ones left."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from rankscope_trainer.fresh_store import fresh_store


def _attempt(store: Store, number: int, *, late: int) -> list[str]:
    """Let `number` ranks come, one of them late; return what each reads of the others."""
    seen = [""] * number

    def join(rank: int) -> None:
        if rank == late:
            time.sleep(0.1)
        own = fresh_store(store, rank=rank, world_size=number, timeout_seconds=20)
        seen[rank] = "".join(str(int(own.check([f"left/{other}"]))) for other in range(8))
        arrived.wait(20)
        own.set(f"left/{rank}", "an address")

    arrived = threading.Barrier(number)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return seen


@pytest.mark.parametrize("late", [0, 1, 2])
def test_nothing_of_an_earlier_attempt_is_seen(late: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not declared so
    for number in (3, 3, 2, 4):
        assert _attempt(store, number, late=late) == ["0" * 8] * number


def test_what_one_rank_writes_the_others_read() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    read: list[bytes] = []

    def join(rank: int) -> None:
        own = fresh_store(store, rank=rank, world_size=2, timeout_seconds=20)
        own.set(f"from/{rank}", str(rank))
        read.append(own.get(f"from/{1 - rank}"))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(read) == [b"0", b"1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_comes_alone_says_so(rank: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("offer", "of a dead rank")
    with pytest.raises(TimeoutError, match="did not all come"):
        fresh_store(store, rank=rank, world_size=2, timeout_seconds=0.3)
