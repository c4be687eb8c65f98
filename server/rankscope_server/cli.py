"""`rankscope serve`: reads the settings, listens, prints where, ends on a signal."""

from __future__ import annotations

import errno
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import sqlalchemy as sa
import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from rankscope_server import own_log
from rankscope_server.access import tokens
from rankscope_server.access.local import has_tokens
from rankscope_server.access.oidc import issuer_of
from rankscope_server.alerts import from_file
from rankscope_server.api.app import create_app
from rankscope_server.api.service import Service
from rankscope_server.certificate import RENEW_SECONDS, Certificate
from rankscope_server.connections import allow_many_connections, protocol
from rankscope_server.memory import share_arenas
from rankscope_server.settings import (
    SETTINGS,
    Configuration,
    Settings,
    SettingsError,
    check_door,
    public_value,
    read,
    without_password,
)
from rankscope_server.store.disk import disk_of
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreUnavailableError,
    StoreVersionError,
    explain,
    foresee,
    only_server,
    open_engines,
)
from rankscope_server.store.objects import open_blobs

BACKLOG = 2048
EXIT_USAGE = 2
EXIT_CANNOT_START = 1


class Server(uvicorn.Server):
    """uvicorn that closes the event streams before it waits for connections to end."""

    def __init__(self, config: uvicorn.Config, settings: Settings, url: str) -> None:
        super().__init__(config)
        self._settings, self._url = settings, url
        if settings.tls_cert:
            self._certificate = Certificate(settings.tls_cert, settings.tls_key)
            config.callback_notify, config.timeout_notify = self._renew, RENEW_SECONDS

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

    async def _renew(self) -> None:
        if self.config.ssl is not None:
            self._certificate.renew(self.config.ssl)


def serve(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit status."""
    try:
        configuration = read(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as error:
        return _refuse(str(error), EXIT_USAGE)
    settings = configuration.settings
    try:
        tables = read_tables(settings)
    except SettingsError as error:
        return _refuse(str(error), EXIT_USAGE)
    if configuration.is_check:
        return check(configuration, tables)
    own_log.configure(settings.log_level, settings.log_format)
    _forget_ready_file(settings)  # of a server that was killed
    try:
        listener = listen(settings)
        try:
            check_door(settings, _open_store(settings))
        except BaseException:
            listener.close()
            raise
    except SettingsError as error:
        return _refuse(str(error), EXIT_USAGE)
    except (OSError, StoreInUseError, StoreVersionError) as error:
        return _refuse(str(error), EXIT_CANNOT_START)
    allow_many_connections()
    share_arenas()  # before there are threads
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level=settings.log_level,
        log_config=None,  # its lines go into the own log, in the same form
        access_log=False,  # the own one names the request
        timeout_graceful_shutdown=settings.shutdown_seconds,
        server_header=False,
        lifespan="on",
        http=protocol(settings.body_seconds),
        proxy_headers=False,  # see `api/proxies.py`
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    scheme = "https" if settings.tls_cert else "http"
    server = Server(config, settings, url_of(settings.host, listener.getsockname()[1], scheme))
    # What was imported stays: to go through it again and again costs answers 50 ms at a time.
    gc.collect()
    gc.freeze()
    # A batch makes thousands of objects and no cycle: looking for some less often saves 5 %.
    gc.set_threshold(50_000, 20, 50)
    try:
        with _interrupted_by_sigterm():
            server.run([listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again once everything is closed
        pass
    finally:
        listener.close()
        _forget_ready_file(settings)
    return 0 if server.started else EXIT_CANNOT_START


def read_tables(settings: Settings) -> list[tuple[str, str]]:
    """Return what the tables of the file hold, in words. Raises SettingsError."""
    alerts, issuer = from_file.read(settings.file), issuer_of(settings)
    words = {"alerts": f"{len(alerts.channels)} channels, {len(alerts.rules)} rules"}
    if issuer is not None:
        words["oidc"] = f"{issuer.num_grants} grants; the issuer is asked at the first sign-in"
    return [(name, text) for name, text in words.items() if name in settings.file.tables]


def check(configuration: Configuration, tables: Sequence[tuple[str, str]] = ()) -> int:
    """Print the settings in force and what a start would meet; return its exit status.

    `tables`: what the tables of the file hold, in words.

    A server that runs already, to be replaced by this one, is no failure.
    """
    settings, problems = configuration.settings, list[str]()
    rows = [
        (setting.name, str(public_value(settings, setting)), settings.sources[setting.name].where)
        for setting in SETTINGS
        if setting.name in settings.sources
    ]
    rows += [(name, words, f"{settings.file.path}: {name}") for name, words in tables]
    try:
        listen(settings).close()
        address = "free"
    except OSError as error:
        is_taken = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
        address = "in use; free it, or say another --port" if is_taken else str(error)
        problems += [] if is_taken else [address]
    url = settings.address_of_database()
    try:
        store = foresee(url)
        check_door(settings, has_tokens(url))
    except SettingsError as error:
        problems.append(str(error))
        address = str(error)
    except (OSError, SQLAlchemyError, ImportError, StoreVersionError) as error:
        store = _no_store(settings, error)
        problems.append(store)
    where = f"{settings.host} port {settings.port}"
    rows += [("address", where, address), ("store", without_password(url), store)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, note in rows:
        sys.stdout.write(f"{name:{widths[0]}}  {value:{widths[1]}}  {note}\n")
    return EXIT_CANNOT_START if problems else 0


def _no_store(settings: Settings, error: Exception) -> str:
    if not settings.database_url and disk_of(settings.address_of_database(), 0, 0).is_used_up():
        return f"the disk of {settings.directory()} is full; free a few MiB there"
    flag = "--database-url" if settings.database_url else "--data-dir"
    reason = explain(error)
    if reason is not None and reason.cause == "damaged":
        store = without_password(settings.address_of_database())
        return f"{reason}: {store}; {reason.remedy}, or choose another store with {flag}"
    return f"{error}; choose another store with {flag}"


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


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the address that a person can open."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


def announce(settings: Settings, url: str) -> None:
    """Write to standard output and to the ready file that requests are accepted."""
    store = without_password(settings.address_of_database())
    sys.stdout.write(f"Rankscope is at {url} (data in {store})\n")
    sys.stdout.flush()
    if settings.ready_file:
        path = Path(settings.ready_file)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        part.replace(path)  # what waits for the file never reads half of it


def _open_store(settings: Settings) -> bool:
    """Return whether the store holds tokens.

    Before uvicorn runs: there a failure would be a traceback, here it is one sentence.
    """
    url = settings.address_of_database()
    try:
        disk = disk_of(url, settings.disk_reserve_bytes, settings.disk_low_bytes)
        disk.open()
        with only_server(url):
            engines = open_engines(url, settings.synchronous)
            try:
                check_blobs(settings, *engines)
                with engines[1].connect() as connection:
                    return tokens.exist(connection)
            finally:
                for engine in engines:
                    engine.dispose()
    except (OSError, SQLAlchemyError, StoreUnavailableError, ImportError) as error:
        # ImportError: no driver for it
        raise OSError(_no_store(settings, error)) from error


def check_blobs(settings: Settings, writer: sa.Engine, reader: sa.Engine) -> None:
    """Raise SettingsError where the store of objects cannot be opened; it need not answer."""
    if settings.segments and importlib.util.find_spec("pyarrow") is None:
        raise SettingsError("segments need pyarrow: pip install 'rankscope[server,objects]'")
    try:
        with open_blobs(settings.blobs, writer, reader, is_synced=False):
            pass
    except (OSError, ImportError) as error:
        raise SettingsError(f"blobs: {error}") from error


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
