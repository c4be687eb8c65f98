"""One rank of the torture: trains, and the victim dies at its step in the way that it is told.

The collectives are plain all_reduces, PER_STEP of them a step, so that the number of the last one
is known beforehand.
"""

from __future__ import annotations

import ctypes
import datetime
import logging
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

PER_STEP = 3
STEPS = 40
LIFE_SECONDS = 2.0  # in which the collector, which samples once a second, sees what a rank uses
logger = logging.getLogger("torture")


def main() -> None:
    way, victim, step, place, code, word = sys.argv[1:]
    began = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` leaves it ignored
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TORTURE_STORE']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    death = (int(step), int(place)) if rank == int(victim) else (0, 0)

    def die() -> None:
        DEATHS[way](int(code))

    train(rank, death, die, word, until=began + LIFE_SECONDS)
    dist.destroy_process_group()


def train(
    rank: int, death: tuple[int, int], die: Callable[[], Any], word: str, until: float
) -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(1, STEPS + 1):
        for place in range(PER_STEP):
            if (step, place) == death:
                time.sleep(max(0.0, until - time.monotonic()))
                logger.info("rank %d says goodbye: %s", rank, word)
                die()
            dist.all_reduce(torch.ones(100))
        parameter.sum().backward()
        optimizer.step()
        logger.info("rank %d did step %d", rank, step)


def by_signal(number: int) -> Callable[[int], None]:
    def die(code: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return die


def segfault(code: int) -> None:
    ctypes.string_at(0)


def bus_error(code: int) -> None:
    """Read a mapped page that the file does not have any more."""
    descriptor = os.memfd_create("torture")
    os.ftruncate(descriptor, 8192)
    mapped = mmap.mmap(descriptor, 8192)
    os.ftruncate(descriptor, 0)
    sum(mapped[4096:])


def divide_by_zero(code: int) -> None:
    ctypes.CDLL(None).div(1, 0)


def terminate(code: int) -> None:
    """End as an exception that no C++ frame catches does."""
    library = next(line.split()[-1] for line in open("/proc/self/maps") if "libstdc++" in line)
    ctypes.CDLL(library)._ZSt9terminatev()


def raise_it(code: int) -> None:
    raise ValueError(f"no way out: {code}")


def raise_in_thread(code: int) -> None:
    thread = threading.Thread(target=raise_it, args=(code,))
    thread.start()
    thread.join()
    os._exit(code)


def out_of_memory(code: int) -> None:
    """Ask for more than the process may have; the kernel's limit says no."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def eat_memory(code: int) -> None:
    """Take memory until the kernel kills."""
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))


def deadlock(code: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_interpreter_lock(code: int) -> None:
    """Stay in C without giving the interpreter lock away; interrupted sleeps go on."""
    sleep = ctypes.PyDLL(None).sleep
    for _ in range(1000):
        sleep(1)


def outlive_parent(code: int) -> None:
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
    os._exit(code)


DEATHS: dict[str, Callable[[int], Any]] = {
    "sigterm": by_signal(signal.SIGTERM),
    "sigkill": by_signal(signal.SIGKILL),
    "sigint": by_signal(signal.SIGINT),
    "segfault": segfault,
    "abort": lambda code: os.abort(),
    "bus-error": bus_error,
    "divide-by-zero": divide_by_zero,
    "terminate": terminate,
    "os-exit": lambda code: os._exit(code),
    "sys-exit": lambda code: sys.exit(code),
    "exception": raise_it,
    "thread-exception": raise_in_thread,
    "memory-error": out_of_memory,
    "oom-killer": eat_memory,
    "deadlock": deadlock,
    "holds-interpreter-lock": hold_interpreter_lock,
    "parent-killed": outlive_parent,
}

if __name__ == "__main__":
    main()
