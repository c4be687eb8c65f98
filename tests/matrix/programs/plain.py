"""Every operation of torch.distributed, once synchronous and once with async_op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ledger import VERSION, Ledger


def run(ledger: Ledger) -> None:
    for is_async in (False, True):
        _symmetric(ledger, is_async)
        _rooted(ledger, is_async)
        _lists(ledger, is_async)
        _scattering(ledger, is_async)
    _reduce_ops(ledger)
    _dtypes(ledger)
    dist.barrier()
    ledger.did("barrier")
    dist.monitored_barrier()  # over the store and send/recv of the backend itself: no record


def _wait(is_async: bool, work: Any) -> None:
    if is_async:
        work.wait()


def _symmetric(ledger: Ledger, is_async: bool) -> None:
    x = torch.ones(100 + is_async)
    _wait(is_async, dist.all_reduce(x, async_op=is_async))
    ledger.did("all_reduce", [x], [x], reduce="sum", is_async=is_async)
    _wait(is_async, dist.barrier(async_op=is_async))
    ledger.did("barrier", is_async=is_async)
    n = ledger.size
    result = torch.empty(n * x.numel())
    _wait(is_async, dist.all_gather_into_tensor(result, x, async_op=is_async))
    ledger.did("all_gather_into_tensor", [x], [result], is_async=is_async)
    given, result = torch.ones(n * 7), torch.empty(n * 7)
    _wait(is_async, dist.all_to_all_single(result, given, async_op=is_async))
    ledger.did("all_to_all_single", [given], [result], is_async=is_async)


def _rooted(ledger: Ledger, is_async: bool) -> None:
    x, n = torch.ones(33), ledger.size
    for root in (0, n - 1):
        here = ledger.rank == root
        _wait(is_async, dist.broadcast(x, src=root, async_op=is_async))
        ledger.did("broadcast", [x] * here, [x], peer=root, is_async=is_async)
        _wait(is_async, dist.reduce(x, dst=root, async_op=is_async))
        ledger.did("reduce", [x], [x] * here, peer=root, reduce="sum", is_async=is_async)
        parts = [torch.ones(5) for _ in range(n)] if here else []
        one = torch.ones(5)
        _wait(is_async, dist.gather(one, parts if here else None, dst=root, async_op=is_async))
        ledger.did("gather", [one], parts, peer=root, is_async=is_async)
        _wait(is_async, dist.scatter(one, parts if here else None, src=root, async_op=is_async))
        ledger.did("scatter", parts, [one], peer=root, is_async=is_async)


def _lists(ledger: Ledger, is_async: bool) -> None:
    x, n = torch.ones(12, dtype=torch.int64), ledger.size
    parts = [torch.empty_like(x) for _ in range(n)]
    _wait(is_async, dist.all_gather(parts, x, async_op=is_async))
    ledger.did("all_gather", [x], parts, is_async=is_async)
    ledger.attempt(
        lambda: _wait(is_async, dist.all_to_all(parts, [x] * n, async_op=is_async)),
        "all_to_all", [x] * n, parts, is_async=is_async,
    )  # fmt: skip


def _scattering(ledger: Ledger, is_async: bool) -> None:
    n = ledger.size
    given, mine = torch.ones(n * 9), torch.empty(9)
    _wait(is_async, dist.reduce_scatter_tensor(mine, given, async_op=is_async))
    ledger.did("reduce_scatter_tensor", [given], [mine], reduce="sum", is_async=is_async)
    parts = list(given.chunk(n))
    ledger.attempt(
        lambda: _wait(is_async, dist.reduce_scatter(mine, parts, async_op=is_async)),
        "reduce_scatter", parts, [mine], reduce="sum", is_async=is_async,
    )  # fmt: skip
    gather: Callable[..., Any] | None = getattr(dist, "gather_into_tensor", None)
    if gather is not None and VERSION >= (2, 14):
        here = ledger.rank == 1
        whole = torch.empty(n * 9) if here else None
        ledger.attempt(
            lambda: _wait(is_async, gather(mine, whole, dst=1, async_op=is_async)),
            "gather_into_tensor", [mine], [] if whole is None else [whole],
            peer=1, is_async=is_async,
        )  # fmt: skip


def _reduce_ops(ledger: Ledger) -> None:
    x = torch.ones(6, dtype=torch.int32)
    for name in ("MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        ledger.did("all_reduce", [x], [x], reduce=name.lower())


def _dtypes(ledger: Ledger) -> None:
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.uint8, torch.int8):
        x = torch.ones(8, dtype=dtype)
        dist.all_reduce(x)
        ledger.did("all_reduce", [x], [x], reduce="sum")
    x = torch.ones(10, 10)[:, ::2].contiguous()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5))
    ledger.did("all_reduce", [torch.ones(5)], [torch.ones(5)], reduce="sum")
    with torch.no_grad():
        dist.broadcast(x, src=0)
    ledger.did("broadcast", [x] * (ledger.rank == 0), [x], peer=0)
    y = torch.ones(4, dtype=torch.complex64)
    dist.all_reduce(y)  # torch hands over a view as pairs of real numbers
    ledger.did("all_reduce", [torch.view_as_real(y)], [torch.view_as_real(y)], reduce="sum")
