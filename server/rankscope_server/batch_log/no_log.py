"""In place of the log, in a process that takes no batches."""

from __future__ import annotations

from typing import NoReturn

from rankscope_server.batch_log.interface import Origin, ReadBatch, unavailable


class NoLog:
    """Refuses every batch for now, so that a load balancer tries a gateway."""

    def __init__(self, role: str) -> None:
        self._why = f"this server is a {role}; gateways take batches"

    async def read(
        self, body: bytes, encoding: str, *, takes_commands: bool, is_urgent: bool = False
    ) -> NoReturn:
        """Raise StoreUnavailableError."""
        raise unavailable(self._why)

    async def append(self, batch: ReadBatch, origin: Origin) -> NoReturn:
        """Raise StoreUnavailableError."""
        raise unavailable(self._why)

    def failure(self) -> str:
        """Return nothing: it need not take any."""
        return ""
