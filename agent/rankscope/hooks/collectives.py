"""Collectives and send/recv of every process group, seen where Python and C++ callers meet.

A kernel for each `c10d::*` operator at the dispatch key BackendSelect runs for plain
`torch.distributed` calls, DDP's C++ reducer, functional collectives and pipelining alike, and
passes the call on unchanged. The end comes from the future of the work where the backend has
one, else from `Work.wait`, which is patched on its class and also tells exposed waiting.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rankscope import schema
from rankscope.guard import guarded
from rankscope.hooks.base import HookSkipped

if TYPE_CHECKING:
    from rankscope.runtime import Agent

_DISPATCH_KEY = "BackendSelect"
_MAX_FRAMES = 40
_now = time.monotonic_ns
_BY_WAIT = schema.ENDED_BY.index("wait")
Token: TypeAlias = tuple[int, bool]  # slot number; whether the autograd engine called


@dataclass(frozen=True)
class Operator:
    """One operator of the c10d library and where its parts stand among the arguments."""

    operator: str
    operation: str
    group_at: int  # position of the process group; tensors stand before it
    peer_at: int = -1  # position of the root or peer, a rank of the group
    has_future: bool = True  # gloo has none for some; then the end is Work.wait's
    one_way: str = ""  # "in": only the root (or nobody) hands in; "out": the same for the result


OPERATORS: tuple[Operator, ...] = (
    Operator("allreduce_", "all_reduce", 1),
    Operator("allreduce_coalesced_", "all_reduce_coalesced", 1),
    Operator("broadcast_", "broadcast", 1, peer_at=2, one_way="in"),
    Operator("reduce_", "reduce", 1, peer_at=3, one_way="out"),
    Operator("barrier", "barrier", 1),
    Operator("send", "send", 1, peer_at=2, has_future=False, one_way="out"),
    Operator("recv_", "recv", 1, peer_at=2, has_future=False, one_way="in"),
    Operator("recv_any_source_", "recv_any_source", 1, has_future=False, one_way="in"),
    Operator("allgather_", "all_gather", 2),
    Operator("_allgather_base_", "all_gather_into_tensor", 2),
    Operator("allgather_coalesced_", "all_gather_coalesced", 2),
    Operator("allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced", 2),
    Operator("reduce_scatter_", "reduce_scatter", 2, has_future=False),
    Operator("_reduce_scatter_base_", "reduce_scatter_tensor", 2, has_future=False),
    Operator(
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor_coalesced",
        2,
        has_future=False,
    ),
    Operator("alltoall_", "all_to_all", 2),
    Operator("alltoall_base_", "all_to_all_single", 2),
    Operator("gather_", "gather", 2, peer_at=3),
    Operator("scatter_", "scatter", 2, peer_at=3),
    Operator("gather_into_tensor_", "gather_into_tensor", 2, peer_at=3),
)


class Collectives:
    """Every collective and send/recv: when it was entered and ended, its group, bytes, place."""

    name: ClassVar[str] = "collectives"
    needs: ClassVar[str] = "torch.distributed.distributed_c10d"

    def __init__(self) -> None:
        self._library: Any = None

    def install(self, agent: Agent) -> str:
        """Wait for the first process group: torch may not be wholly imported yet."""
        import torch.distributed.distributed_c10d as c10d

        original = c10d._new_process_group_helper

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            guarded_before(*args)
            return original(*args, **kwargs)

        @guarded
        def guarded_before(
            group_size: int, group_rank: int, global_ranks: list[int], *_: Any
        ) -> None:
            if self._library is None:
                self._install_kernels(agent)
            if not global_ranks:  # the default group: now the rank is known in any case
                agent.world_known(group_rank, group_size)

        agent.patch(c10d, "_new_process_group_helper", new_process_group)
        if c10d.is_initialized():  # groups are there already: their earlier operations are lost
            self._install_kernels(agent)
        return "kernels at BackendSelect; ends from futures and Work.wait"

    def _install_kernels(self, agent: Agent) -> None:
        import torch
        from torch._C._distributed_c10d import Work

        watch = _Watch(agent)
        library = torch.library.Library("c10d", "IMPL")
        for operator in OPERATORS:
            overload = getattr(torch.ops.c10d, operator.operator, None)
            if overload is None:
                continue  # this version of torch does not have it
            name = f"c10d::{operator.operator}"
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, _DISPATCH_KEY):
                agent.sources[f"collectives/{operator.operation}"] = (
                    "skipped: another library watches this operator"
                )
                continue
            kernel = _kernel(operator, overload.default, watch)
            library.impl(operator.operator, kernel, _DISPATCH_KEY, with_keyset=True)
        self._library = library  # its life is the life of the kernels
        agent.undo.append(library._destroy)
        _patch_wait(agent, Work, watch)


def _kernel(operator: Operator, overload: Any, watch: _Watch) -> Callable[..., Any]:
    """Return the kernel of one operator. Only its ends are ours: an error of the call passes."""
    import torch

    after = torch._C.DispatchKey.BackendSelect
    redispatch = overload.redispatch
    work_in_tuple = len(overload._schema.returns) == 2
    issued, failed = guarded(watch.issuer(operator, overload._schema)), watch.failed
    returned = guarded(watch.returner(operator))

    def kernel(keyset: Any, *args: Any) -> Any:
        token = issued(args)
        try:
            result = redispatch(keyset.remove(after), *args)
        except BaseException:
            if token is not None:
                failed(token[0])
            raise
        if token is not None:
            returned(token, result[1] if work_in_tuple else result)
        return result

    return kernel


class _Watch:
    """The two ends of every kernel, and the works whose wait is still to come."""

    def __init__(self, agent: Agent) -> None:
        import torch
        from torch._C._distributed_c10d import ProcessGroup, Work

        self._agent = agent
        self._unbox_group = ProcessGroup.unbox
        self._unbox_work = Work.unbox
        self._dtypes = {
            getattr(torch, name): index
            for index, name in enumerate(schema.DTYPES)
            if hasattr(torch, name)
        }
        self._tensor = torch.Tensor
        self._inside_torch: dict[Any, bool] = {}
        self._not_the_user = (torch.__path__[0], _OWN_DIRECTORY, contextlib.__file__, "<")
        self._waiting: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._latest_work: Any = None  # keeps one wrapper alive until the caller has it
        self.failed = guarded(self._failed)
        self.wait_ended = guarded(self._wait_ended)

    def issuer(self, operator: Operator, types: Any) -> Callable[[tuple[Any, ...]], Token | None]:
        """Return what runs before one operator: it records the call and returns its token."""
        agent, unbox_group, measure = self._agent, self._unbox_group, self._measure
        operation = schema.OPERATIONS.index(operator.operation)
        names = [argument.name for argument in types.arguments]
        async_at = names.index("async_op") if "async_op" in names else -1
        reduce_at = names.index("reduce_op") if "reduce_op" in names else -1
        reduce_op, issued_by = self._reduce_op, schema.ISSUED_BY.index("kernel")
        group_at, peer_at = operator.group_at, operator.peer_at
        is_p2p = operator.operation in schema.P2P_OPERATIONS
        one_way, rooted = operator.one_way, not is_p2p
        is_barrier = operator.operation == "barrier"
        always = schema.FLAG_P2P | schema.FLAG_ASYNC if is_p2p else 0

        def issued(args: tuple[Any, ...]) -> Token | None:
            recorder = agent.recorder
            if recorder is None or not recorder.active:
                return None
            group = recorder.group(unbox_group(args[group_at]))
            peer = -1
            if peer_at >= 0:
                place = args[peer_at]
                peer = group.ranks[place] if 0 <= place < len(group.ranks) else -1
            output_bytes, num_tensors, dtype = measure(args[0])
            if group_at == 2:
                input_bytes, num_2, dtype_2 = measure(args[1])
                num_tensors, dtype = max(num_tensors, num_2), dtype or dtype_2
            else:
                input_bytes = output_bytes
            if one_way and not (rooted and peer == recorder.identity.rank):
                if one_way == "in":
                    input_bytes = 0
                else:
                    output_bytes = 0
            flags = always
            if 0 <= async_at < len(args) and args[async_at]:
                flags |= schema.FLAG_ASYNC
            call_site, by_engine = self._call_site()
            number = recorder.issued(
                operation,
                group,
                group.next_p2p(operation, peer) if is_p2p else next(group.sequence),
                0 if is_barrier else input_bytes,
                0 if is_barrier else output_bytes,
                dtype,
                num_tensors,
                peer,
                reduce_op(args[reduce_at]) if 0 < reduce_at < len(args) else 0,
                flags,
                call_site,
                issued_by,
            )
            if by_engine:
                agent.engine_latest = (number, recorder.last_arrived_ns)
            return number, by_engine

        return issued

    def returner(self, operator: Operator) -> Callable[[Token, Any], None]:
        """Return what runs after one operator: it arranges that the end is seen."""
        agent, unbox_work, waiting = self._agent, self._unbox_work, self._waiting
        has_future, at_end = operator.has_future, schema.FLAG_END_IS_UPPER_BOUND
        by_future = schema.ENDED_BY.index("future")

        def returned(token: Token, boxed: Any) -> None:
            number, by_engine = token
            recorder = agent.recorder
            assert recorder is not None
            recorder.returned(number)  # first: the callback below may run at once
            work = unbox_work(boxed)
            if work is None:
                return
            if not by_engine:  # C++ callers never wait through Python
                key = id(work)
                waiting[key] = (weakref.ref(work, lambda _: waiting.pop(key, None)), number)
                self._latest_work = work
            if has_future:
                ended = recorder.ended
                try:
                    future = work.get_future()
                except RuntimeError:  # this backend has none for this operation
                    return
                future.add_done_callback(lambda _: ended(number, at_end, by_future))

        return returned

    def _failed(self, number: int) -> None:
        recorder = self._agent.recorder
        if recorder is not None:
            recorder.failed(number)

    def _wait_ended(self, work: Any, began_ns: int, failed: bool) -> None:
        recorder = self._agent.recorder
        known = self._waiting.pop(id(work), None)
        if recorder is None or known is None or known[0]() is not work:
            return
        duration = _now() - began_ns
        if failed:
            recorder.failed(known[1])
        else:
            recorder.ended(known[1], schema.FLAG_END_FROM_WAIT, _BY_WAIT)
        recorder.blocked(known[1], duration)
        if self._agent.clock.is_ours():
            self._agent.clock.add_blocked(duration)

    def _reduce_op(self, boxed: Any) -> int:
        """Return the index of a boxed ReduceOp; its number is that of torch's enum."""
        number: int = boxed.op()
        return number + 1 if number < len(schema.REDUCE_OPS) - 2 else len(schema.REDUCE_OPS) - 1

    def _measure(self, tensors: Any) -> tuple[int, int, int]:
        """Return (bytes, number of tensors, dtype of the first) of nested lists of tensors."""
        if isinstance(tensors, self._tensor):
            return tensors.nbytes, 1, self._dtypes.get(tensors.dtype, 0)
        if len(tensors) == 1:
            return self._measure(tensors[0])
        size_bytes = count = dtype = 0
        for part in tensors:
            part_bytes, part_count, part_dtype = self._measure(part)
            size_bytes += part_bytes
            count += part_count
            dtype = dtype or part_dtype
        return size_bytes, count, dtype

    def _call_site(self) -> tuple[int, bool]:
        """Return the innermost frame outside torch, and whether the autograd engine called.

        Frames: this, issued, the guard, the kernel, then the caller of the operator. Calls from
        the autograd engine share one place per backward pass, found once.
        """
        frame = sys._getframe(4)
        agent = self._agent
        if frame.f_code is not agent.engine_code:
            return self._users_frame(frame), False
        if agent.engine_call_site < 0:
            agent.engine_call_site = self._users_frame(frame)
        return agent.engine_call_site, True

    def _users_frame(self, frame: Any) -> int:
        recorder = self._agent.recorder
        assert recorder is not None
        known = self._inside_torch
        for _ in range(_MAX_FRAMES):
            code = frame.f_code
            inside = known.get(code)
            if inside is None:
                inside = known[code] = code.co_filename.startswith(self._not_the_user)
            if not inside:
                return recorder.call_site(code, frame.f_lineno)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return 0


_OWN_DIRECTORY = __file__.rpartition("/hooks/")[0]


def _patch_wait(agent: Agent, work_class: Any, watch: _Watch) -> None:
    """Time Work.wait on its class. From __dict__: a bound original would break the method."""
    original = work_class.__dict__.get("wait")
    if original is None:
        raise HookSkipped("Work.wait is not a method of its class in this version")
    wait_ended = watch.wait_ended

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = _now()
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            wait_ended(self, began, True)
            raise
        wait_ended(self, began, False)
        return result

    wait.__doc__ = original.__doc__
    agent.patch(work_class, "wait", wait)
