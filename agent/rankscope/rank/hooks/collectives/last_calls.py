"""What a rank does about its last collectives before their group or its interpreter ends.

A thread of gloo reports an end after the caller knows of it, and then lets go of a Python object
that the autograd engine left in its thread state. If that falls into the interpreter's end the
thread aborts the process (https://github.com/pytorch/pytorch/pull/179291): scripts that end right
after a backward pass die so now and then, with Rankscope or without it. If it falls into the end of
the group, whose last owner joins the thread and holds the interpreter lock meanwhile, both wait
for ever; to report an end takes the thread's time, so that Rankscope would make that likelier.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from rankscope.process import family
from rankscope.rank.context import Context

_DRAIN_SECONDS = 1.0
_LAST_RETURN_SECONDS = 0.02  # for the last thread to take the interpreter lock and let go of it


def drain(pending: Callable[[], int]) -> None:
    """Wait until every end has been reported, 1 s at most."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while pending() and time.monotonic() < deadline:
        time.sleep(0.002)


def at_exit(action: Callable[[], Any]) -> None:
    """Do something before the interpreter ends, in a child of multiprocessing too."""
    atexit.register(action)
    if family.is_child():  # these may leave without `atexit`
        sys.modules["multiprocessing.util"].Finalize(None, action, exitpriority=0)


def let_threads_through() -> None:
    """Give the backend's threads the interpreter lock once more."""
    time.sleep(_LAST_RETURN_SECONDS)


def settle_before_destruction(context: Context) -> None:
    """See that a group's threads are done with the interpreter before a program destroys it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    original = c10d.destroy_process_group

    @wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        context.settle()
        original(*args, **kwargs)

    # `dist` has it where torch is wholly imported
    context.patch_all((c10d, dist), "destroy_process_group", destroy_process_group)
