"""Connections of the server: many at a time, and closed where no request comes of them."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST_FILES = 65_536


def protocol(pause_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which closes what sends no whole head for so long.

    uvicorn bounds the time between two requests of a connection only: one that sends a byte of a
    head now and then, or of a body whose answer is there already, would stay for ever.
    """

    class Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cycle: Any = self.cycle
            if cycle is None or cycle.response_complete:
                self._expect()
            else:  # in work: what comes of its body is bounded in `api/body_limits.py`
                self._forget()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _expect(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(pause_seconds, self.transport.abort)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Bounded


def allow_many_connections() -> None:
    """Raise the number of open files to what the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
