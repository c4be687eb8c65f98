"""One question to the control server of a rank.

The answer is JSON by decision: a dump in pickle form is never opened in this process. Its size,
its time and the number of its entries are bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from pathlib import Path

from rankscope.files.flight_recorder import Dump, DumpError, parse

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 64 << 20
_PIECE_BYTES = 1 << 18
_MAX_ADDRESS = 100  # of 108 bytes that the kernel takes


class AskError(OSError):
    """The rank gave no answer that can be used; the message says why."""


class Question:
    """One POST, made in a thread of its own: a server that hangs holds up nothing else."""

    def __init__(self, path: Path, handler: str) -> None:
        self.handler = handler
        self.answer = b""
        self.dump: Dump | None = None
        self.error: AskError | None = None
        self.clock = (0, 0)  # monotonic and wall ns at the answer
        self.is_gone = False  # the socket is gone
        self._path = path
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        self._connection: _UnixConnection | None = None
        self._thread = threading.Thread(target=self._run, name="rankscope-flight", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether the answer, or an error, is there; end what takes too long."""
        if self._thread.is_alive() and time.monotonic() > self._deadline:
            connection = self._connection
            if connection is not None and connection.line is not None:
                with contextlib.suppress(OSError):
                    connection.line.shutdown(socket.SHUT_RDWR)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
            self.clock = both_clocks()
            self.dump = parse(self.answer)
        except AskError as error:
            self.error = error
        except DumpError as error:
            self.error = AskError(str(error))
        except FileNotFoundError as error:
            self.is_gone, self.error = True, AskError(str(error))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = AskError(f"{type(error).__name__}: {error}")

    def _ask(self) -> bytes:
        self._connection = connection = _UnixConnection(self._path)
        with contextlib.closing(connection):
            connection.request("POST", f"/handler/{self.handler}")
            with contextlib.closing(connection.getresponse()) as response:
                return self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size = [], 0
        while piece := response.read1(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise AskError(f"the answer has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > self._deadline:
                raise AskError(f"no whole answer within {TIMEOUT_SECONDS:g} s")
        if response.status != 200:
            raise AskError(f"status {response.status}")
        if response.length:
            raise AskError("the answer was cut")
        return b"".join(pieces)


def both_clocks() -> tuple[int, int]:
    """Return (monotonic, wall) of one moment: the attempt of five that was not interrupted."""
    tries = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, (before + after) // 2, wall))
    return min(tries)[1:]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self.line: socket.socket | None = None  # `sock` is None once the response has it
        self._path = path

    def connect(self) -> None:
        self.sock = self.line = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_SECONDS)
        address = str(self._path)
        if len(os.fsencode(address)) <= _MAX_ADDRESS:
            self.sock.connect(address)
            return
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{descriptor}/{self._path.name}")
        finally:
            os.close(descriptor)
