"""What server processes on one PostgreSQL say to each other, by LISTEN and NOTIFY.

Hints, no data: what they are about is in the store, and one that is lost makes nothing wrong. After
a break of the connection those who listen hear that they may have missed some.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa

log = logging.getLogger(__name__)
CHANNEL = "rankscope"
_TURN_SECONDS = 0.2  # what a hint may wait before it is sent
_PAUSE_SECONDS = 1.0  # before a connection that broke is tried again
_MOST_WAITING = 10_000
_NOTIFY = sa.select(sa.func.pg_notify(CHANNEL, sa.bindparam("text")))


class Notice(msgspec.Struct, frozen=True):
    """That something changed: a topic of the event stream, or work that waits for its owner."""

    sender: str  # a life of a process
    topic: str
    changed: tuple[str, ...] = ()
    step: int | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Notice).decode


class Notices:
    """Says and hears, in a thread of its own. `start` and `close` once."""

    def __init__(
        self,
        engine: sa.Engine,
        sender: str,
        on_notice: Callable[[Notice], None],
        on_gap: Callable[[], None],
    ) -> None:
        """`engine` makes connections that commit by themselves."""
        self._engine, self._sender = engine, sender
        # Notices are read from the driver itself: its errors come as they are.
        driver: Any = engine.dialect.dbapi
        self._errors: tuple[type[Exception], ...] = (sa.exc.SQLAlchemyError, driver.Error)
        self._on_notice, self._on_gap = on_notice, on_gap
        self._waiting: deque[Notice] = deque(maxlen=_MOST_WAITING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-notices", daemon=True)

    def start(self) -> None:
        """Begin to say and to hear."""
        self._thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """End; what waits is not said any more."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    def say(self, topic: str, changed: tuple[str, ...] = (), step: int | None = None) -> None:
        """Say something to all other processes; from any thread, without waiting."""
        self._waiting.append(Notice(self._sender, topic, changed, step))

    def _work(self) -> None:
        is_broken = False
        while not self._stop.is_set():
            try:
                with self._engine.connect() as hearing, self._engine.connect() as saying:
                    hearing.exec_driver_sql(f"LISTEN {CHANNEL}")
                    if is_broken:
                        self._on_gap()
                    while not self._stop.is_set():
                        self._hear(hearing)
                        self._send(saying)
            except self._errors as error:
                if not is_broken:
                    log.warning("other servers are not heard now: %s", error)
                is_broken = True
                self._stop.wait(_PAUSE_SECONDS)

    def _hear(self, connection: sa.Connection) -> None:
        driver: Any = connection.connection.driver_connection
        for heard in driver.notifies(timeout=_TURN_SECONDS):
            try:
                notice = _decode(heard.payload)
            except msgspec.MsgspecError:  # of another version, or another program
                continue
            if notice.sender != self._sender:
                self._on_notice(notice)

    def _send(self, connection: sa.Connection) -> None:
        while self._waiting:
            connection.execute(_NOTIFY, {"text": _encode(self._waiting[0]).decode()})
            self._waiting.popleft()
