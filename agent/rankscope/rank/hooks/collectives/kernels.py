"""The portable source: a Python kernel for each c10d operator at the dispatch key BackendSelect.

It runs for plain `torch.distributed` calls, DDP's C++ reducer, functional collectives and
pipelining alike, on every version of PyTorch since 2.6, and passes the call on unchanged.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.files import ring
from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded, guarded_one, guarded_two
from rankscope.rank.hooks.collectives.operators import (
    OPERATORS,
    Operator,
    Places,
    places,
)
from rankscope.rank.hooks.collectives.outside import Outside, Registrations
from rankscope.rank.hooks.collectives.watch import Token, Watch, WatchedSource, patch_wait
from rankscope.rank.recorder import MEASURE_EVERY
from rankscope.wire import schema

_DEPTH = 3  # frames of ours above the caller's: issued, the guard, the kernel
_MAX_KNOWN = 256
_thread_cpu_ns = time.thread_time_ns


class Kernels(WatchedSource):
    """Python kernels at the dispatcher: every path, every version, some 20 us a call.

    On gloo they leave the dispatcher for thinned steps, which then cost nothing.
    """

    name: ClassVar[str] = "kernels"
    outside_us: ClassVar[float] = 70.0

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where this source cannot work."""
        import torch

        if not hasattr(torch._C, "_dispatch_library"):
            raise HookSkipped("kernels cannot be taken back in this version")

    def install(self, context: Context) -> str:
        """Register the kernels."""
        import torch

        watch = Watch(context, "kernel", depth=_DEPTH, has_boxes=True)
        self._watch = watch
        registrations = Registrations()
        for operator in OPERATORS:
            packet = getattr(torch.ops.c10d, operator.operator, None)
            if packet is None:
                continue  # this version of torch does not have it
            kernel = _kernel(operator, packet.default, watch)
            if not registrations.add("c10d", operator.operator, kernel):
                context.sources[f"collectives/{operator.operation}"] = (
                    "skipped: another library watches this operator"
                )
        patch_wait(context, watch, registrations)
        registrations.put_in()
        context.add_undo(registrations.take_out)
        Outside(context, registrations).install()
        return "kernels at BackendSelect; ends from futures and Work.wait"


def _kernel(operator: Operator, overload: Any, watch: Watch) -> Callable[..., Any]:
    """Return the kernel of one operator. Only its ends are ours: an error of the call passes."""
    import torch

    after = torch._C.DispatchKey.BackendSelect
    redispatch = overload._handle.redispatch_boxed  # what `overload.redispatch` calls
    where = places(overload._schema)
    work_in_tuple = where.work_in_tuple
    issued, failed = guarded_one(_issuer(operator, where, watch)), watch.failed
    returned = guarded_two(watch.returned)

    is_measured = itertools.cycle((False,) * (MEASURE_EVERY - 1) + (True,))
    cost = guarded(watch.cost)

    def kernel(keyset: Any, *args: Any) -> Any:
        began = _thread_cpu_ns() if next(is_measured) else 0
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
    context, measure, call_site = watch.context, watch.measure, watch.call_site
    engine_reduces: dict[int, int] = {}  # by group: to ask a boxed ReduceOp runs an interpreter
    unbox_group, reduce_ops = watch.unbox_group, _ReduceOps(where.reduce_at)
    operation = schema.OPERATIONS.index(operator.operation)
    group_at, peer_at = operator.group_at, operator.peer_at
    async_at, async_default, has_reduce = where.async_at, where.async_default, where.reduce_at > 0
    issue = watch.issuer(operator, knows_async=async_at >= 0)
    results, functional = watch.results, operator.functional

    def issued(args: tuple[Any, ...]) -> Token | None:
        recorder = context.recorder
        if recorder is None or not recorder.active:
            return None
        group = recorder.group(unbox_group(args[group_at]))
        output = measure(args[0])
        is_whole = not recorder.buffer[ring.THINNED_AT]
        site, by_engine = call_site(recorder, is_whole)
        if by_engine:  # DDP's: the same for all buckets of a model
            reduces = engine_reduces.get(group.index)
            if reduces is None:
                reduces = engine_reduces[group.index] = reduce_ops.of(args)
        else:
            reduces = reduce_ops.of_call(args) if has_reduce else 0
        is_async = args[async_at] if 0 <= async_at < len(args) else async_default
        token = issue(
            recorder,
            operation,
            group,
            measure(args[1]) if group_at == 2 else output,
            output,
            args[peer_at] if peer_at >= 0 else -1,
            reduces,
            is_async,
            site,
            by_engine,
            is_whole,
        )
        if functional and not by_engine and (is_async or async_at < 0):
            tensors = args[0]
            results.note(tensors if isinstance(tensors, list) else (tensors,), token[0], token[2])
        return token

    return issued


class _ReduceOps:
    """Finds the ReduceOp of a call: to ask a boxed one runs an interpreter, 12 us in a cold cache.

    torch's own functions pass on what they were given as `op`. So the boxed one is asked once for
    each of these functions and each member of the enum, which never changes.
    """

    def __init__(self, at: int) -> None:
        """`at`: position of the ReduceOp among the arguments, 0 or less: there is none."""
        import torch.distributed.distributed_c10d as c10d

        self._at = at
        self._file = c10d.__file__
        self._enum: Any = c10d.ReduceOp.RedOpType
        # by the ids of function and member, which are kept for them
        self._known: dict[tuple[int, int], tuple[int, Any, Any]] = {}

    def of_call(self, args: tuple[Any, ...]) -> int:
        """Return the index of the ReduceOp of a call that Python made."""
        if not 0 < self._at < len(args):
            return 0
        try:
            frame = sys._getframe(1 + _DEPTH)  # and above this one
        except ValueError:  # C++ called, in a thread without Python frames
            return self.of(args)
        code = frame.f_code
        if code.co_filename != self._file:  # a frame of the user's would keep its locals for this
            return self.of(args)
        op = frame.f_locals.get("op")
        known = self._known.get((id(code), id(op)))
        if known is not None:
            return known[0]
        number = self.of(args)
        if type(op) is self._enum and len(self._known) < _MAX_KNOWN:
            self._known[id(code), id(op)] = number, code, op
        return number

    def of(self, args: tuple[Any, ...]) -> int:
        """Return the index of a call's ReduceOp; its number is that of torch's enum.

        0, unknown, without one, and in versions whose box Python cannot open (2.6 and 2.9).
        """
        if not 0 < self._at < len(args):
            return 0
        read = getattr(args[self._at], "op", None)
        if read is None:
            return 0
        number: int = read()
        return number + 1 if number < len(schema.REDUCE_OPS) - 2 else len(schema.REDUCE_OPS) - 1
