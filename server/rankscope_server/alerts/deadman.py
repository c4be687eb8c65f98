"""The dead-man switch: an outside service is asked again and again while this server is well.

It notices by itself when the requests stay away. They are sent only while the store takes writes
and the analysis keeps up: a server that is up and blind is as good as none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotInTime

import sqlalchemy as sa

from rankscope_server.alerts.channels import secrets_of_url
from rankscope_server.alerts.send.outbound import DeliveryError, Outbound, post, redacted
from rankscope_server.alerts.store import probe
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.leases import Held
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
_WRITE_SECONDS = 10.0
_ELSEWHERE_SECONDS = 2.0  # between two looks whether this process is to ask


class DeadManSwitch:
    """Asks the address. `start` and `close` once; without an address it does nothing."""

    def __init__(
        self, url: str, pause_seconds: float, writer: Writer, outbound: Outbound,
        behind: Mapping[str, Callable[[], float]], lease: Callable[[], Held | None],
    ) -> None:  # fmt: skip
        self._lease = lease
        self._url, self._pause_seconds = url, pause_seconds
        self._writer, self._outbound = writer, outbound
        self._behind = behind  # seconds by which something lags, by its name
        self._secrets = sorted(filter(None, secrets_of_url(url)), key=len, reverse=True)
        self.asked_ms: float | None = None  # when it was asked last, and took it
        self.problem = ""  # why it is not asked, or did not take it
        self.is_elsewhere = False  # another process asks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-deadman", daemon=True)

    @property
    def is_set(self) -> bool:
        """Return whether there is an address."""
        return bool(self._url)

    def start(self) -> None:
        """Begin to ask."""
        if self._url:
            self._thread.start()

    def close(self, timeout_seconds: float = 0.5) -> None:
        """Ask no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def ask_now(self) -> None:
        """Ask once if all is well, unless another process does; note what is not."""
        self.is_elsewhere = self._lease() is None
        if self.is_elsewhere:
            self.problem = ""
            return
        problem = self._illness()
        if not problem:
            try:
                post(self._url, b"", {}, self._outbound)
                self.asked_ms = time.time() * 1e3
            except DeliveryError as error:
                problem = f"it was not reached: {redacted(str(error), self._secrets)}"
        if problem and problem != self.problem:
            log.warning("the dead-man switch is not asked: %s", problem)
        self.problem = problem

    def _illness(self) -> str:
        for name, behind_seconds in self._behind.items():
            if (late_s := behind_seconds()) > self._pause_seconds:
                return f"{name} is behind by {late_s:.0f} s"
        try:
            self._writer.submit(probe).result(_WRITE_SECONDS)
        except (StoreUnavailableError, CancelledError) as error:
            return f"the store takes no writes: {error}"
        except NotInTime:
            return f"the store took no write within {_WRITE_SECONDS:.0f} s"
        except sa.exc.SQLAlchemyError as error:
            return f"the store takes no writes: {type(error).__name__}"
        return ""

    def _work(self) -> None:
        while True:
            try:
                self.ask_now()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                log.error("the dead-man switch is not asked", exc_info=error)
            # Who takes it over must not wait a whole pause: the request would be late.
            pause_s = self._pause_seconds
            if self.is_elsewhere:
                pause_s = min(pause_s, _ELSEWHERE_SECONDS)
            if self._stop.wait(pause_s):
                return
