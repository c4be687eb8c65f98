"""Outbound HTTP with the standard library: one kept connection, proxies from the environment."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 256 << 20  # all reports of 1,000 nodes, unpacked


@dataclass(frozen=True)
class Answer:
    """What a server said; `body` is unpacked."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the JSON object of the answer, empty if it is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def why(self) -> str:
        """Return what a refusal says: the server's own words, else those of whoever answered."""
        error = self.json().get("error")
        if isinstance(error, dict):
            return f"{error.get('what', '')}; {error.get('remedy', '')}".strip("; ")
        text = self.body[:80].decode("ascii", "replace")
        return f"HTTP {self.status}: {''.join(c if c.isprintable() else '.' for c in text)}"


class Outbound:
    """Requests to one server, one at a time. Raises ValueError for an address that is none."""

    def __init__(self, url: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._is_tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._proxy = proxy_of(parts.scheme, self._host, self._port, environ)
        self._connection: http.client.HTTPConnection | None = None

    @property
    def way(self) -> str:
        """Return where requests go, with the proxy between."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        to = f"{'https' if self._is_tls else 'http'}://{host}:{self._port}{self._prefix}"
        return to if self._proxy is None else f"{to} through the proxy {self._proxy.shown}"

    def request(
        self, method: str, path: str, body: bytes | None = None, token: str = "",
        timeout_s: float = 0.0,
    ) -> Answer:  # fmt: skip
        """Send a request and return the answer. Raises OSError, HTTPException.

        A kept connection that the server closed meanwhile is tried anew once.
        """
        is_kept = self._connection is not None
        try:
            return self._request(method, path, body, token, timeout_s or self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_kept or isinstance(error, TimeoutError):
                raise
        try:
            return self._request(method, path, body, token, timeout_s or self._timeout_s)
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, from any thread: a request that waits fails at once."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _request(
        self, method: str, path: str, body: bytes | None, token: str, timeout_s: float
    ) -> Answer:
        connection = self._connection = self._connection or self._connect()
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        headers = {"User-Agent": "rankscope-preflight", "Accept-Encoding": "gzip"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        target = self._prefix + path
        if self._proxy is not None and not self._is_tls:
            host = f"[{self._host}]" if ":" in self._host else self._host
            target = f"http://{host}:{self._port}{target}"
            headers |= self._proxy.headers
        connection.request(method, target, body, headers)
        response = connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES)
        if response.will_close or not response.isclosed():
            self.close()
        if response.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        return Answer(response.status, data)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = (
            (self._host, self._port)
            if self._proxy is None
            else (self._proxy.host, self._proxy.port)
        )
        if not self._is_tls:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        context = ssl.create_default_context()
        tls = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        if self._proxy is not None:
            tls.set_tunnel(self._host, self._port, self._proxy.headers)
        return tls


@dataclass(frozen=True)
class Proxy:
    """A proxy that the environment names."""

    host: str
    port: int
    variable: str
    headers: dict[str, str]

    @property
    def shown(self) -> str:
        """Return it for people, without its password."""
        return f"{self.host}:{self.port} ({self.variable})"


def proxy_of(scheme: str, host: str, port: int, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy for an address, as curl reads the environment. Raises ValueError.

    Upper-case HTTP_PROXY is left alone: in a CGI program it is what a stranger sent.
    """
    names = ("https_proxy", "HTTPS_PROXY") if scheme == "https" else ("http_proxy",)
    for name in (*names, "all_proxy", "ALL_PROXY"):
        value = environ.get(name, "")
        if not value or is_direct(host, port, environ):
            continue
        parts = urlsplit(value if "//" in value else f"http://{value}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{name}={value!r}: only http:// proxies are spoken here")
        headers = {}
        if parts.username:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            basic = base64.b64encode(words.encode()).decode()
            headers["Proxy-Authorization"] = f"Basic {basic}"
        return Proxy(parts.hostname, parts.port or 3128, name, headers)
    return None


def is_direct(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Return whether no_proxy names an address: itself, a suffix of it, or everything."""
    words = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    for word in (one.strip().lower() for one in words.split(",")):
        name = word.lstrip("*").lstrip(".")
        if word == "*" or (name and name in (host, f"{host}:{port}")):
            return True
        if name and host.lower().endswith(f".{name}"):
            return True
    return False
