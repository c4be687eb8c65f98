"""`rankscope serve`: reads the settings, listens, prints where, ends on a signal."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from rankscope_server.api.app import create_app
from rankscope_server.api.service import Service
from rankscope_server.settings import Settings, SettingsError, parse
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreVersionError,
    only_server,
    open_engines,
)

BACKLOG = 2048
EXIT_USAGE = 2
EXIT_CANNOT_START = 1


class Server(uvicorn.Server):
    """uvicorn that closes the event streams before it waits for connections to end."""

    def __init__(self, config: uvicorn.Config, settings: Settings, url: str) -> None:
        super().__init__(config)
        self._settings, self._url = settings, url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, then print the address."""
        await super().startup(sockets)
        if self.started:
            announce(self._settings, self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: an open stream would hold the server up to its time limit."""
        service: Service | None = getattr(self.config.app.state, "service", None)  # type: ignore[union-attr]
        if service is not None:
            service.broker.close()
        super().handle_exit(sig, frame)


def serve(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit status."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as error:
        return _refuse(str(error), EXIT_USAGE)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _forget_ready_file(settings)  # of a server that was killed
    try:
        listener = listen(settings)
        try:
            _check_store(settings)
        except BaseException:
            listener.close()
            raise
    except (OSError, StoreInUseError, StoreVersionError) as error:
        return _refuse(str(error), EXIT_CANNOT_START)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=settings.shutdown_seconds,
        server_header=False,
        lifespan="on",
    )
    server = Server(config, settings, url_of(settings.host, listener.getsockname()[1]))
    try:
        with _interrupted_by_sigterm():
            server.run([listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again once everything is closed
        pass
    finally:
        listener.close()
        _forget_ready_file(settings)
    return 0 if server.started else EXIT_CANNOT_START


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # named TCP, or asyncio leaves Nagle's algorithm on: each kept connection answers 40 ms late
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; "
            "choose another with --port, 0 takes a free one"
        ) from error
    return listener


def url_of(host: str, port: int) -> str:
    """Return the address that a person can open."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{port}"


def announce(settings: Settings, url: str) -> None:
    """Write to standard output and to the ready file that requests are accepted."""
    sys.stdout.write(f"Rankscope is at {url} (data in {settings.address_of_database()})\n")
    sys.stdout.flush()
    if settings.ready_file:
        path = Path(settings.ready_file)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        part.replace(path)  # what waits for the file never reads half of it


def _check_store(settings: Settings) -> None:
    # Before uvicorn runs: there a failure would be a traceback, here it is one sentence.
    url = settings.address_of_database()
    try:
        with only_server(url):
            for engine in open_engines(url, settings.synchronous):
                engine.dispose()
    except (OSError, SQLAlchemyError, ImportError) as error:  # ImportError: no driver for it
        flag = "--database-url" if settings.database_url else "--data-dir"
        raise OSError(f"{error}; choose another store with {flag}") from error


def _forget_ready_file(settings: Settings) -> None:
    if settings.ready_file:
        Path(settings.ready_file).unlink(missing_ok=True)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process like Ctrl-C does: in order, and with an exit status."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse(reason: str, status: int) -> int:
    sys.stderr.write(f"rankscope serve: {reason}\n")
    return status


if __name__ == "__main__":
    sys.exit(serve())
