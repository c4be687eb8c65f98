"""The threads of the server share few heaps of the C library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

_NUM_THREADS = 8
_PROGRAM = f"""
import ctypes, sys, threading
from rankscope_server.memory import share_arenas

print(share_arenas(), flush=True)
begin = threading.Barrier({_NUM_THREADS})

def work():
    begin.wait()
    held = []
    for _ in range(2_000):
        held.append(bytearray(10_000))
    begin.wait()  # all hold theirs at once

threads = [threading.Thread(target=work) for _ in range({_NUM_THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def heaps_of(**environment: str) -> tuple[str, int]:
    """Return what `share_arenas` says in a process of many threads, and how many heaps it has."""
    names = os.environ.keys() - {"MALLOC_ARENA_MAX"}
    kept = {name: os.environ[name] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=kept | environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    said, _, info = done.stdout.partition("\n")
    return said, info.count("<heap nr=")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc: it has no mallopt")
def test_threads_share_two_heaps() -> None:
    said, num_heaps = heaps_of()
    assert said == "True"
    assert num_heaps <= 2
    assert heaps_of(MALLOC_ARENA_MAX="6") == ("False", 6)  # what the operator says goes before
