"""SIGTERM and SIGINT end the trainer soon, quietly, and with a code that says so.

    a signal             `Stopped` at the next bytecode, or the end of the process after 3 s
    SIGTERM with grace   noted; before the next step all ranks agree to leave, save, and end;
                         or the end after `grace_seconds`, where peers are gone or too slow

A second SIGTERM shortens nothing: launcher and batch system often send one each. Either way the
code is 128 + signal: a launcher that restarts failed ranks goes on, from the checkpoint, with
those that are left.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from types import FrameType

GRACE_SECONDS = 3.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """The process was asked to leave; its code is 128 + signal, as a shell would report it."""


class Stopping:
    """Turns the first signal into `Stopped`, and makes sure that it takes effect.

    Python runs a signal handler only between two bytecodes of the main thread. A rank that waits
    in a collective for one that never arrives is inside C++ and would not get there. The
    interpreter does write the signal's number to the wake-up descriptor at once; a thread reads
    it and ends the process if the main thread has not done so within the grace period.
    """

    def __init__(self) -> None:
        """Nothing was received yet."""
        self.received = 0
        self._is_leaving = False
        self._grace_seconds = 0.0

    def give_grace(self, seconds: float) -> None:
        """From now on the loop looks at `received` in each step; leaving may take so long."""
        self._grace_seconds = seconds

    def install(self) -> None:
        """Take over both signals; called once, in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._stop)
        self._writer = writer  # closed with the process; the descriptor must stay valid
        threading.Thread(
            target=self._end_after_grace, args=(reader,), name="trainer-stopping", daemon=True
        ).start()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._grace_seconds:
            self.received = self.received or number
        elif not self._is_leaving:
            self._is_leaving = True
            self.received = self.received or number
            raise Stopped(128 + self.received)

    def _end_after_grace(self, reader: socket.socket) -> None:
        first, deadline = 0, float("inf")
        while True:
            left = max(0.0, deadline - time.monotonic()) if first else None
            if not select.select([reader], [], [], left)[0]:
                os._exit(128 + first)
            number = reader.recv(1)[0]
            if number in SIGNALS:
                has_grace = number == signal.SIGTERM and self._grace_seconds
                grace = self._grace_seconds if has_grace else GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
                first = first or number
