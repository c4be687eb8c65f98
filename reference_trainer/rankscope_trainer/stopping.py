"""SIGTERM and SIGINT end the trainer soon, quietly, and with a code that tells so."""

from __future__ import annotations

import os
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

    def install(self) -> None:
        """Take over both signals; called once, in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._stop)
        self._writer = writer  # closed with the process; the descriptor must stay valid
        threading.Thread(
            target=_end_after_grace, args=(reader,), name="trainer-stopping", daemon=True
        ).start()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received = number
            raise Stopped(128 + number)


def _end_after_grace(reader: socket.socket) -> None:
    while True:
        number = reader.recv(1)[0]
        if number in SIGNALS:
            time.sleep(GRACE_SECONDS)
            os._exit(128 + number)
