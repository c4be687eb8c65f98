"""Programs that call each other by `torch.distributed.rpc`: who they are, and what they wait for.

Such a program may have no process group at all. Its rank is then the one that it gives to
`init_rpc`; and what its main thread waits for is a future, or an object that another rank keeps.
What the library's own threads do for callers is no step of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.native_waits import timed_wait

_RANK, _WORLD_SIZE = 3, 4  # arguments of what init_rpc calls, by place


class RemoteCalls:
    """The rank that a program has in torch.distributed.rpc, and its waits for calls."""

    name: ClassVar[str] = "rpc"
    needs: ClassVar[str] = "torch.distributed.rpc"

    def install(self, context: Context) -> str:
        """Wait for `init_rpc`: without it nothing is called."""
        from torch.distributed import rpc

        if not rpc.is_available():
            raise HookSkipped("this build of PyTorch has no RPC")
        original: Callable[..., Any] = rpc._init_rpc_backend
        scope = context.scope.nested()

        @guarded
        def ready(rank: int, world_size: int | None) -> None:
            if world_size:  # else ranks come and go, and their number says nothing
                context.world_known(rank, world_size)
            if not scope.is_used:
                with context.within(scope):
                    _time_waits(context)

        def init_rpc_backend(*args: Any, **kwargs: Any) -> Any:
            if len(args) > _WORLD_SIZE:
                ready(args[_RANK], args[_WORLD_SIZE])
            return original(*args, **kwargs)

        context.patch(rpc, "_init_rpc_backend", init_rpc_backend)
        if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
            caller = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
            infos = caller.get_worker_infos()
            ready(rpc.get_worker_info().id, len(infos))
        return "init_rpc, futures of calls, RRef.to_here"


def _time_waits(context: Context) -> None:
    import torch
    from torch._C._distributed_rpc import PyRRef

    # What a call returns is of this class, and not of torch.futures.Future, which comes from it.
    for owner, name in ((torch._C.Future, "wait"), (PyRRef, "to_here")):
        context.patch(owner, name, timed_wait(context, getattr(owner, name)))
