"""Waits for collectives inside C++ functions that Python calls: nothing of them is seen there.

DDP's broadcast of buffers waits for its works in C++, so do `monitored_barrier` and the exchange of
the buckets' new order. A future of a work is waited for without the work. Here these functions are
timed as a whole: what the thread did not compute in them, it waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded

_now, _cpu = time.monotonic_ns, time.thread_time_ns


def native_waits() -> tuple[tuple[Any, str, Any], ...]:
    """Return owner and name of each function that waits so; a version may lack some.

    The third value is what it returns where it had nothing to do, None where nothing says so.
    """
    import torch.distributed as dist
    import torch.futures
    from torch._C._distributed_c10d import ProcessGroup, Reducer

    return (
        (dist, "_broadcast_coalesced", None),
        (ProcessGroup, "monitored_barrier", None),
        (Reducer, "_rebuild_buckets", False),  # in each forward, and true in one
        (torch.futures.Future, "wait", None),
        (torch.futures, "wait_all", None),
    )


def patch_native_waits(context: Context) -> None:
    """Time what waits in C++, as long as collectives are recorded."""
    from torch.nn.parallel import DistributedDataParallel

    for owner, name, idle in native_waits():
        original = owner.__dict__.get(name)
        if original is not None:  # else this version does not have it
            context.patch(owner, name, timed_wait(context, original, idle))
    _notice_hooks(context, DistributedDataParallel)


def timed_wait(
    context: Context, original: Callable[..., Any], idle: Any = None
) -> Callable[..., Any]:
    """Return `original` timed: what its thread did not compute in it, it waited."""

    @guarded
    def ended(began_ns: int, cpu_ns: int, seen_ns: int, head: int) -> None:
        recorder = context.recorder
        if recorder is None or not context.clock.is_ours():
            return
        waited = _now() - began_ns - (_cpu() - cpu_ns) - (recorder.thread_blocked_ns - seen_ns)
        if waited > 0:  # beside what was seen inside
            recorder.thread_blocked(waited)
            if recorder.num_issued > head:
                recorder.blocked(recorder.num_issued - 1, waited)

    @wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        recorder = context.recorder
        if recorder is None:
            return original(*args, **kwargs)
        begun = _now(), _cpu(), recorder.thread_blocked_ns, recorder.num_issued
        result = idle
        try:
            result = original(*args, **kwargs)
        finally:
            if idle is None or result is not idle:
                ended(*begun)
        return result

    return timed


def _notice_hooks(context: Context, model: Any) -> None:
    original = model.register_comm_hook

    @guarded
    def noticed(model: Any) -> None:
        if context.recorder is not None:
            context.recorder.backward.with_hooks.add(model)

    @wraps(original)
    def register_comm_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        noticed(self)
        return original(self, *args, **kwargs)

    context.patch(model, "register_comm_hook", register_comm_hook)
