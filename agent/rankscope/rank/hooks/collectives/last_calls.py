"""What a rank does about its last collectives before their group or its interpreter goes.

A thread of gloo tells an end after the caller has heard of it, and then lets go of a Python object
that the autograd engine left in its thread state. If that falls into the interpreter's end the
thread aborts the process (https://github.com/pytorch/pytorch/pull/179291): scripts that end right
after a backward pass die so now and then, with Rankscope or without it. If it falls into the end of
the group, whose last owner joins the thread and holds the interpreter lock meanwhile, both wait
for ever; to be told of an end takes the thread's time, so that Rankscope would make that likelier.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from rankscope.process import family

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_DRAIN_SECONDS = 1.0
_LAST_RETURN_SECONDS = 0.02  # for the last thread to take the interpreter lock and let go of it


def drain(pending: Callable[[], int]) -> None:
    """Wait until no end is to be told any more, a second at most."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while pending() and time.monotonic() < deadline:
        time.sleep(0.002)


def at_exit(action: Callable[[], Any]) -> None:
    """Do something before the interpreter goes, in a child of multiprocessing too."""
    atexit.register(action)
    if family.is_child():  # these may leave without `atexit`
        sys.modules["multiprocessing.util"].Finalize(None, action, exitpriority=0)


def let_threads_through() -> None:
    """Give the backend's threads the interpreter lock once more."""
    time.sleep(_LAST_RETURN_SECONDS)


def settle_before_destruction(agent: Agent) -> None:
    """See that a group's threads are done with the interpreter before a program destroys it."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    original = c10d.destroy_process_group

    @wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        agent.settle()
        original(*args, **kwargs)

    agent.patch(c10d, "destroy_process_group", destroy_process_group)
    if getattr(dist, "destroy_process_group", None) is original:  # torch is wholly imported
        agent.patch(dist, "destroy_process_group", destroy_process_group)
