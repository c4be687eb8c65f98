"""The client of NATS, which wants an event loop: one of its own, for the threads of a server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from rankscope_server.settings import Settings

log = logging.getLogger(__name__)
_CONNECT_SECONDS, _PAUSE_SECONDS = 2, 1
CALL_SECONDS = 4.0  # less than a collector waits for its answer
FAILURES = (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError)
T = TypeVar("T")


class NatsClient:
    """Connects, and connects again for as long as it lives. `start` and `close` once."""

    def __init__(self, settings: Settings) -> None:
        self._servers, self._credentials = settings.nats_servers(), settings.nats_credentials
        self._loop = asyncio.new_event_loop()
        self._client = Client()
        self._said = ""
        self._thread = threading.Thread(target=self._work, name="rankscope-nats", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop)

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Disconnect, and end."""
        closed = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            closed.result(timeout_seconds)
        except FAILURES as error:
            log.info("the connection to the log did not end in order: %s", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)

    @property
    def is_connected(self) -> bool:
        """Return whether a server of NATS answers."""
        return bool(self._client.is_connected)

    @property
    def max_payload_bytes(self) -> int:
        """Return the largest message that the servers take; 0 where none says it now."""
        return int(self._client.max_payload) if self.is_connected else 0

    @property
    def client(self) -> Client:
        """Return the client itself, for what runs on its loop."""
        return self._client

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work on its loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await self._client.close()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _connect(self) -> None:
        while True:
            try:
                await self._client.connect(
                    self._servers,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_PAUSE_SECONDS,
                    connect_timeout=_CONNECT_SECONDS,
                    error_cb=self._failed,
                    user_credentials=self._credentials or None,
                )
                return
            except FAILURES as error:
                await self._failed(error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _failed(self, error: Exception) -> None:
        self.say(error)

    def say(self, error: Exception) -> None:
        """Write into the server's log why the log cannot be used; the same reason once."""
        said = f"{type(error).__name__}: {error}"
        if said != self._said:  # once, not with every try
            self._said = said
            log.warning("the log cannot be used now: %s", said)
