"""What the child does with its plan: store, process group, all-reduces, halves. Needs torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rankscope.preflight.collective.halving import search

SIZES_BYTES = (4, 65_536, 4 * 2**20, 64 * 2**20)  # a path MTU black hole passes the small ones
_NUM_REPEATS = 3  # the best of them counts: a single one meets whatever the machine does just then
_LONG_S = 0.1  # beside it the pauses of a scheduler, some 10 ms, do not count: once is enough
_HALVING_SHARE = 1 / 40  # of the budget, for one all-reduce: there are 12 and more
_RAMP = 251  # a prime: chunks that change places show, as no power of two is a multiple of it
_WEIGHTS = 61  # 250 x 61 x 1,000 ranks stay below 2^31, so the sum is exact
_C10D: Any = dist  # its stub leaves the stores out
Report = Callable[..., None]


class CollectivePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent sends the child when the paths are known to be good."""

    rank: int
    nodes: tuple[str, ...]  # one rank each, in the order of ranks
    address: str
    port: int
    backend: str
    listen_fd: int = -1  # of rank 0: the socket that has the port
    store_timeout_s: float = 20.0  # others may still import torch; torch's own are 15-30 minutes
    timeout_s: float = 12.0  # of connecting the group, and of each collective
    budget_s: float = 3.0  # of the collectives; a larger size must fit into what is left


def work(plan: CollectivePlan, report: Report) -> None:
    """Go through all stages and report each."""
    timeout = timedelta(seconds=plan.timeout_s)
    store = _store(plan, report)
    store.set_timeout(timeout)
    dist.init_process_group(
        plan.backend,
        store=_C10D.PrefixStore("smoke", store),
        rank=plan.rank,
        world_size=len(plan.nodes),
        timeout=timeout,
    )
    members = _Members(plan.backend)
    members.latest(0.0)  # backends connect lazily: the first collective belongs to the start
    report("group")
    report("collectives")
    done = dict(_sizes(plan, members, report))
    if len(plan.nodes) > 2:
        report("halving")
        _halve(plan, members, done, report)
    report("done")
    # rank 0 holds the store: it leaves last, or the others would print errors
    store.set(f"left/{plan.rank}", b"")
    if plan.rank == 0:
        store.wait([f"left/{rank}" for rank in range(len(plan.nodes))], timeout)
    os._exit(0)  # the threads of a backend may hang in their destructors; all is reported


def all_reduce(tensor: torch.Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> None:
    """Run one all-reduce and wait for it."""
    dist.all_reduce(tensor, op=op, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize()


class _Members:
    """All members of the job, and what they agree on."""

    def __init__(self, backend: str) -> None:
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")

    def latest(self, seconds: float) -> float:
        """Return the longest time of all; the same number for all."""
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def filled(self, size_bytes: int, weight: int) -> torch.Tensor:
        """Return a ramp times `weight`, in one buffer of that size."""
        places = torch.arange(size_bytes // 4, dtype=torch.int32, device=self.device)
        return places.remainder_(_RAMP).add_(1).mul_(weight)


def _weight(rank: int) -> int:
    """Return the factor by which this rank's part differs from the others'."""
    return rank % _WEIGHTS + 1


def _store(plan: CollectivePlan, report: Report) -> Any:
    """Connect, and read what all wrote. Waiting for those who come later does not count."""
    timeout = timedelta(seconds=plan.store_timeout_s)
    started = time.monotonic()
    listener = {"master_listen_fd": plan.listen_fd} if plan.listen_fd >= 0 else {}
    store = _C10D.TCPStore(
        plan.address, plan.port, len(plan.nodes), plan.rank == 0, timeout,
        wait_for_workers=False, **listener,
    )  # fmt: skip
    connected_s = time.monotonic() - started
    ranks = range(len(plan.nodes))
    store.set(f"here/{plan.rank}", plan.nodes[plan.rank])
    store.wait([f"here/{rank}" for rank in ranks], timeout)
    started = time.monotonic()
    names = [store.get(f"here/{rank}").decode() for rank in ranks]
    elapsed_ms = (connected_s + time.monotonic() - started) * 1e3
    if tuple(names) != plan.nodes:
        raise RuntimeError(f"the store names the members {names}, not {list(plan.nodes)}")
    report("store", store_ms=elapsed_ms)
    return store


def _sizes(plan: CollectivePlan, members: _Members, report: Report) -> Iterator[tuple[int, float]]:
    """All-reduce of each size that fits the time; yield it and the best time of the slowest."""
    started = time.monotonic()
    done: list[tuple[int, float]] = []
    for size in SIZES_BYTES:
        left_s = plan.budget_s - members.latest(time.monotonic() - started)
        guess_s = _guess(done, size)
        if guess_s > left_s:
            report("left out", size_bytes=size, guess_ms=guess_s * 1e3)
            return
        report("size", size_bytes=size)
        done.append((size, _best(plan, members, size, left_s, report)))
        yield done[-1]


def _guess(done: list[tuple[int, float]], size: int) -> float:
    """Return the seconds for `size`, in a straight line through the first and the last size."""
    if len(done) < 2:
        return 0.0
    (first, first_s), (last, last_s) = done[0], done[-1]
    return last_s + max(0.0, last_s - first_s) * (size - last) / (last - first)


def _best(
    plan: CollectivePlan, members: _Members, size: int, left_s: float, report: Report
) -> float:
    mine = members.filled(size, _weight(plan.rank))
    wanted = members.filled(size, sum(_weight(rank) for rank in range(len(plan.nodes))))
    best_s, num_wrong = float("inf"), 0
    for turn in range(_NUM_REPEATS):
        tensor = mine.clone()
        members.latest(0.0)  # a barrier
        aligned = time.monotonic()
        all_reduce(tensor)
        latest_s = members.latest(time.monotonic() - aligned)
        best_s = min(best_s, latest_s)
        num_wrong += int((tensor != wanted).sum().item())
        if latest_s > _LONG_S or latest_s * (turn + 2) > left_s:
            break
    report("size", size_bytes=size, elapsed_ms=best_s * 1e3, num_wrong=num_wrong)
    return best_s


def _halve(plan: CollectivePlan, members: _Members, done: dict[int, float], report: Report) -> None:
    """Look for the slow member with the largest size that is quick enough."""
    large = sorted(done)[1:]  # the smallest shows latency only
    if not large:
        return
    quick = [size for size in large if done[size] < plan.budget_s * _HALVING_SHARE]
    size = max(quick, default=large[0])
    tensor = members.filled(size, _weight(plan.rank))

    begun = time.monotonic()

    def measure(group: tuple[int, ...]) -> float:
        if members.latest(time.monotonic() - begun) > plan.budget_s:
            raise _OverTime
        among = dist.new_group(list(group), timeout=timedelta(seconds=plan.timeout_s))
        best_s = float("inf")
        for turn in range(_NUM_REPEATS + 1):
            members.latest(0.0)
            started = time.monotonic()
            if plan.rank in group:
                all_reduce(tensor.clone(), group=among)
            elapsed_s = time.monotonic() - started if plan.rank in group else 0.0
            latest_s = members.latest(elapsed_s)
            best_s = min(best_s, latest_s) if turn else best_s  # the first one connects
        report("half", nodes=_named(plan, group), size_bytes=size, elapsed_ms=best_s * 1e3)
        return best_s

    with contextlib.suppress(_OverTime):
        search(len(plan.nodes), size, measure)


class _OverTime(Exception):
    """Halving has used its time: what was measured until then counts. All leave it together."""


def _named(plan: CollectivePlan, group: Sequence[int]) -> list[str]:
    return [plan.nodes[rank] for rank in group]
