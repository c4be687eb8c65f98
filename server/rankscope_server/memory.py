"""How the C library hands out memory to the threads of this process."""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8  # malloc.h of glibc
_ARENAS = 2


def share_arenas() -> bool:
    """Let all threads take memory from two heaps; return whether the C library can do that.

    glibc gives each thread one of its own, and none of them gives back what the arrays of a look
    or a batch left: with 1,024 ranks that were 150 to 200 MiB of 830. `MALLOC_ARENA_MAX` goes
    before it.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS
        return False
    return bool(mallopt(_M_ARENA_MAX, _ARENAS))
