"""What a rank does about its last collectives before its interpreter goes.

A thread of gloo tells an end after the caller has heard of it, and then lets go of a Python object
that the autograd engine left in its thread state. If that falls into the interpreter's end the
thread aborts the process (https://github.com/pytorch/pytorch/pull/179291): scripts that end right
after a backward pass die so now and then, with Rankscope or without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_DRAIN_SECONDS = 1.0
_LAST_RETURN_SECONDS = 0.02  # for the last thread to take the interpreter lock and let go of it


def drain(pending: Callable[[], int]) -> None:
    """Wait until no end is to be told any more, a second at most."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while pending() and time.monotonic() < deadline:
        time.sleep(0.002)


def let_threads_through() -> None:
    """Give the backend's threads the interpreter lock once more."""
    time.sleep(_LAST_RETURN_SECONDS)
