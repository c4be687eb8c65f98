"""Reads the server's event stream as a page does."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx


class Stream:
    """Reads server-sent events in a thread."""

    def __init__(
        self, url: str, last_id: str = "", headers: Mapping[str, str] | None = None,
        authority: Path | None = None,
    ) -> None:  # fmt: skip
        """`authority`: certificates to trust, of an HTTPS address."""
        self.events: list[dict[str, str]] = []
        self.comments: list[str] = []
        self.ended = threading.Event()
        self.headers: httpx.Headers | None = None
        more = dict(headers or {}) | ({"Last-Event-ID": last_id} if last_id else {})
        verify = ssl.create_default_context(cafile=authority) if authority else True
        self.thread = threading.Thread(target=self.read, args=(url, more, verify), daemon=True)
        self.thread.start()

    def read(self, url: str, headers: dict[str, str], verify: ssl.SSLContext | bool) -> None:
        try:
            with (
                httpx.Client(timeout=30, trust_env=False, verify=verify) as client,
                client.stream("GET", url, headers=headers) as reply,
            ):
                self.headers = reply.headers
                event: dict[str, str] = {}
                for line in reply.iter_lines():
                    if line.startswith(":"):
                        self.comments.append(line)
                    elif line:
                        name, _, value = line.partition(": ")
                        event[name] = value
                    else:
                        if "event" in event:
                            self.events.append(event)
                        event = {}
        except httpx.HTTPError:
            pass
        finally:
            self.ended.set()

    def wait_for(self, condition: Callable[[list[dict[str, str]]], bool]) -> None:
        deadline = time.monotonic() + 15
        while not condition(self.events):
            assert time.monotonic() < deadline, self.events
            time.sleep(0.02)
