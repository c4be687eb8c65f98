"""Keeps a collector running for as long as the launched command does, and waits for it to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.files.start_collector import ensure_collector, take_lock

LOOK_SECONDS = 0.5
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.5, 10.0
_STEADY_SECONDS = 30.0  # a collector that ran for so long is no reason to wait
_RESTARTS_AT_END = 3


@dataclass(frozen=True)
class Left:
    """What waits in the spool when the launcher stops waiting."""

    batches: int
    size_bytes: int
    path: Path


class Supervisor:
    """Starts the collector again, with backoff, whenever its lock is free."""

    def __init__(
        self, run_directory: Path, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._run_directory = run_directory
        self._environ = environ
        self._say = say
        self._stop = threading.Event()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._keep, name="rankscope-supervisor", daemon=True)

    def start(self) -> None:
        """Start a collector now, and look after it from now on."""
        self._ensure()
        self._thread.start()

    def drain(self, timeout_seconds: float) -> Left | None:
        """Wait until the collector has sent everything; return what it has not in time."""
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + timeout_seconds
        restarts = 0
        while time.monotonic() < deadline:
            if self._is_running():
                time.sleep(0.05)
                continue
            if not self.left().batches:
                return None
            if restarts >= _RESTARTS_AT_END:
                break
            restarts += 1
            self._ensure()
        left = self.left()
        return left if left.batches or self._is_running() else None

    def left(self) -> Left:
        """Return what waits in the spool."""
        spool = self._run_directory / "node" / "spool"
        sizes = []
        for path in spool.glob("*.batch"):
            with contextlib.suppress(OSError):
                sizes.append(path.stat().st_size)
        return Left(len(sizes), sum(sizes), spool)

    def terminate(self, timeout_seconds: float) -> None:
        """Ask the collector to end now; it drains for some seconds at most."""
        try:
            pid = int((self._run_directory / "node" / "pid").read_text())
        except (OSError, ValueError):
            return
        if not self._is_running():
            return
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while self._is_running() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _keep(self) -> None:
        backoff, started = _FIRST_BACKOFF_SECONDS, time.monotonic()
        wait = LOOK_SECONDS
        while not self._stop.wait(wait):
            wait = LOOK_SECONDS
            if not self._ensure():
                continue
            now = time.monotonic()
            is_steady = now - started > _STEADY_SECONDS
            backoff = _FIRST_BACKOFF_SECONDS if is_steady else backoff * 2
            wait, started = min(backoff, _LAST_BACKOFF_SECONDS), now

    def _ensure(self) -> bool:
        try:
            return ensure_collector(self._run_directory, self._environ)
        except OSError as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                where = self._run_directory
                self._say(f"cannot start the collector: {error}; ranks still record to {where}")
            return False

    def _is_running(self) -> bool:
        descriptor = take_lock(self._run_directory)
        if descriptor is None:
            return True
        os.close(descriptor)
        return False
