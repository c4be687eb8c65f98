"""Watches that processes are alive, and reads the exit status in the moment they die.

A thread of its own blocks on the pidfds: the status is in /proc only until the parent reaps
the process, which torchrun does within a tenth of a second.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankscope.node.processes.exits import PROC, ExitStatus, read_pidfd, read_zombie
from rankscope.process.family import process_start_ticks

PIDFD_OPEN: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
_POLL_SECONDS = 0.2  # where there is no pidfd
_REREAD_SECONDS = 0.3  # a zombie may be reaped between two looks: the kernel reports it afterwards


@dataclass(frozen=True)
class Death:
    """A watched process is gone."""

    key: str
    status: ExitStatus | None
    time_ns: int


class DeathWatch(threading.Thread):
    """Puts a `Death` into `deaths` for each watched process that ends, and calls `wake`."""

    def __init__(
        self,
        wake: Callable[[], None],
        on_status: Callable[[int, int, ExitStatus], None] = lambda pid, ticks, status: None,
        pidfd_open: Callable[[int], int] | None = PIDFD_OPEN,
        proc: Path = PROC,
    ) -> None:
        super().__init__(name="rankscope-death-watch", daemon=True)
        self.deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._wake = wake
        self._on_status = on_status
        self._pidfd_open = pidfd_open
        self._proc = proc
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._by_descriptor: dict[int, tuple[str, int, int]] = {}
        self._polled: dict[str, tuple[int, int]] = {}  # without pidfd: key -> pid, start ticks

    def watch(self, key: str, pid: int, start_ticks: int) -> bool:
        """Begin to watch; return False if this process is gone."""
        descriptor = -1
        if self._pidfd_open is not None:
            try:
                descriptor = self._pidfd_open(pid)
            except ProcessLookupError:
                return False
            except OSError:  # an old kernel, or a sandbox
                descriptor = -1
        if process_start_ticks(pid) != start_ticks:  # the number is already another process's
            if descriptor >= 0:
                os.close(descriptor)
            return False
        with self._lock:
            if descriptor >= 0:
                self._by_descriptor[descriptor] = (key, pid, start_ticks)
                self._epoll.register(descriptor, select.EPOLLIN)
            else:
                self._polled[key] = (pid, start_ticks)
        return True

    def run(self) -> None:
        """Wait for deaths, for ever; the thread ends with the process."""
        while True:
            for descriptor, _ in self._epoll.poll(_POLL_SECONDS):
                self._on_pidfd(descriptor)
            self._look_at_polled()

    def _on_pidfd(self, descriptor: int) -> None:
        now = time.time_ns()
        with self._lock:
            key, pid, ticks = self._by_descriptor.pop(descriptor)
            self._epoll.unregister(descriptor)
        status = read_zombie(pid, self._proc) or self._ask_kernel(descriptor)
        os.close(descriptor)
        self._report(key, pid, ticks, status, now)

    @staticmethod
    def _ask_kernel(descriptor: int) -> ExitStatus | None:
        """Ask for the status of a process that its parent has just reaped."""
        deadline = time.monotonic() + _REREAD_SECONDS
        while (status := read_pidfd(descriptor)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return status

    def _look_at_polled(self) -> None:
        with self._lock:
            polled = list(self._polled.items())
        for key, (pid, ticks) in polled:
            status = read_zombie(pid, self._proc)
            if status is not None or process_start_ticks(pid) != ticks:
                with self._lock:
                    del self._polled[key]
                self._report(key, pid, ticks, status, time.time_ns())

    def _report(self, key: str, pid: int, ticks: int, status: ExitStatus | None, now: int) -> None:
        if status is not None:
            self._on_status(pid, ticks, status)
        self.deaths.put(Death(key, status, now))
        self._wake()
