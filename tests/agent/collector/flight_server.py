"""An HTTP server on a unix socket that stands where torch's control server would."""

from __future__ import annotations

import contextlib
import http.server
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.files import flight_recorder as flight
from rankscope.files.run_directory import FLIGHT_SETUP, FLIGHT_SOCKET

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone away: that is what some tests are about."""


class FlightServer:
    """Answers at the socket of a rank directory; `answer` may be replaced at any time."""

    def __init__(self, directory: Path, answer: Answer, setup: flight.FlightSetup) -> None:
        self.answer = answer
        self.asked: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.asked.append(self.path)
                with contextlib.suppress(OSError):
                    server.answer(self)

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.socket = directory / FLIGHT_SOCKET
        self._server = _Server(str(self.socket), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        (directory / FLIGHT_SETUP).write_bytes(flight.encode(setup))

    def close(self) -> None:
        """End the server; its socket stays, as that of a killed rank does."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def says(body: Callable[[], bytes], status: int = 200, cut: int = 0) -> Answer:
    """Answer with what `body` gives then; `cut` bytes fewer than announced."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        data = body()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) - cut])

    return answer


def hangs(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Say nothing until the other side gives up."""
    handler.connection.recv(1)


def drips(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Say a little all the time, for ever."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)


def floods(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Say too much."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)
