"""The portable source: a Python kernel for each c10d operator at the dispatch key BackendSelect.

It runs for plain `torch.distributed` calls, DDP's C++ reducer, functional collectives and
pipelining alike, on every version of PyTorch since 2.6, and passes the call on unchanged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope import schema
from rankscope.guard import guarded
from rankscope.hooks.base import HookSkipped
from rankscope.hooks.collectives.operators import (
    MEASURE_EVERY,
    OPERATORS,
    Operator,
    Places,
    places,
)
from rankscope.hooks.collectives.watch import Token, Watch, patch_wait

if TYPE_CHECKING:
    from rankscope.runtime import Agent

_DISPATCH_KEY = "BackendSelect"
_thread_cpu_ns = time.thread_time_ns


class Kernels:
    """Python kernels at the dispatcher: every path, every version, some 20 us a call."""

    name: ClassVar[str] = "kernels"
    outside_us: ClassVar[float] = 100.0

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def cheaper(self) -> str:
        """Leave out call sites."""
        return "" if self._watch is None else self._watch.leave_out()

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where this source cannot work."""
        import torch

        if not hasattr(torch.library.Library, "_destroy"):
            raise HookSkipped("torch.library.Library cannot be taken back in this version")

    def install(self, agent: Agent) -> str:
        """Register the kernels."""
        import torch

        watch = Watch(agent, "kernel", depth=3)  # issued, the guard, the kernel
        self._watch = watch
        library = torch.library.Library("c10d", "IMPL")
        for operator in OPERATORS:
            packet = getattr(torch.ops.c10d, operator.operator, None)
            if packet is None:
                continue  # this version of torch does not have it
            name = f"c10d::{operator.operator}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, _DISPATCH_KEY):
                agent.sources[f"collectives/{operator.operation}"] = (
                    "skipped: another library watches this operator"
                )
                continue
            kernel = _kernel(operator, packet.default, watch)
            library.impl(operator.operator, kernel, _DISPATCH_KEY, with_keyset=True)
        agent.undo.append(library._destroy)  # keeps it alive, and with it the kernels
        patch_wait(agent, watch)
        return "kernels at BackendSelect; ends from futures and Work.wait"


def _kernel(operator: Operator, overload: Any, watch: Watch) -> Callable[..., Any]:
    """Return the kernel of one operator. Only its ends are ours: an error of the call passes."""
    import torch

    after = torch._C.DispatchKey.BackendSelect
    redispatch = overload.redispatch
    where = places(overload._schema)
    work_in_tuple = where.work_in_tuple
    issued, failed = guarded(_issuer(operator, where, watch)), watch.failed
    returned = guarded(_returner(watch))

    calls, cost = itertools.count(1), guarded(watch.cost)

    def kernel(keyset: Any, *args: Any) -> Any:
        began = _thread_cpu_ns() if next(calls) % MEASURE_EVERY == 0 else 0
        token = issued(args)
        own_ns = _thread_cpu_ns() - began if began else 0
        try:
            result = redispatch(keyset.remove(after), *args)
        except BaseException:
            if token is not None:
                failed(token)
            raise
        if token is not None:
            began = _thread_cpu_ns() if own_ns else 0
            returned(token, result[1] if work_in_tuple else result)
            if began:
                cost(own_ns + _thread_cpu_ns() - began)
        return result

    return kernel


def _issuer(
    operator: Operator, where: Places, watch: Watch
) -> Callable[[tuple[Any, ...]], Token | None]:
    """Return what runs before one operator: it records the call and returns its token."""
    agent, measure = watch.agent, watch.measure
    unbox_group, reduce_op = watch.unbox_group, _reduce_op
    operation = schema.OPERATIONS.index(operator.operation)
    group_at, peer_at = operator.group_at, operator.peer_at
    async_at, async_default, reduce_at = where.async_at, where.async_default, where.reduce_at
    issue = watch.issuer(operator, knows_async=async_at >= 0)
    results, functional = watch.results, operator.functional

    def issued(args: tuple[Any, ...]) -> Token | None:
        recorder = agent.recorder
        if recorder is None or not recorder.active:
            return None
        group = recorder.group(unbox_group(args[group_at]))
        output = measure(args[0])
        token = issue(
            recorder,
            operation,
            group,
            measure(args[1]) if group_at == 2 else output,
            output,
            args[peer_at] if peer_at >= 0 else -1,
            reduce_op(args[reduce_at]) if 0 < reduce_at < len(args) else 0,
            args[async_at] if 0 <= async_at < len(args) else async_default,
        )
        if functional and not token[1]:
            tensors = args[0]
            results.note(tensors if isinstance(tensors, list) else (tensors,), token[0], token[2])
        return token

    return issued


def _returner(watch: Watch) -> Callable[[Token, Any], None]:
    unbox_work, returned = watch.unbox_work, watch.returned

    def unboxed(token: Token, boxed: Any) -> None:
        returned(token, unbox_work(boxed))

    return unboxed


def _reduce_op(boxed: Any) -> int:
    """Return the index of a boxed ReduceOp; its number is that of torch's enum.

    0, unknown, in versions whose box Python cannot open (2.6 and 2.9).
    """
    read = getattr(boxed, "op", None)
    if read is None:
        return 0
    number: int = read()
    return number + 1 if number < len(schema.REDUCE_OPS) - 2 else len(schema.REDUCE_OPS) - 1
