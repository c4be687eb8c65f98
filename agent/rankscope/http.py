"""Outbound HTTP of all programs but the ranks: limits, redirects, proxies, errors in one place."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, ProxyError
from urllib3.exceptions import TimeoutError as HttpTimeout
from urllib3.util.ssl_ import create_urllib3_context

from rankscope.address import Address, AddressError, proxy_of, read_address

TIMEOUT_SECONDS = 5.0
CA_VARIABLE = "RANKSCOPE_CA_FILE"  # the setting ca_file: one place for every program
MAX_ANSWER_BYTES = 1 << 20
_MAX_ERROR_BYTES = 64 << 10  # of an answer that is shown, not read
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK_BYTES = 64 << 10
_SLOWEST_BYTES_PER_SECOND = 64 << 10  # of a link: what takes longer is tried again


class HttpError(Exception):
    """There is no usable answer; the message says why. `is_timeout`: it did not come in time."""

    def __init__(self, text: str, *, is_timeout: bool = False) -> None:
        super().__init__(text)
        self.is_timeout = is_timeout


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a server said; `body` is unpacked, and cut where the status is an error.

    `location` is where a redirect leads that was not followed.
    """

    status: int
    body: bytes
    retry_after_seconds: float = 0.0
    location: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the JSON object of the answer, empty if it is none."""
        return json_object(self.body)

    def why(self) -> str:
        """Return what a refusal says: the server's own words, else the status and the text."""
        if self.location:
            return f"HTTP {self.status}: {self.moved_to}"
        error = self.fields.get("error")
        if isinstance(error, dict):
            return f"{error.get('what', '')}; {error.get('remedy') or ''}".strip("; ")
        text = self.body[:80].decode("ascii", "replace")
        return f"HTTP {self.status}: {''.join(c if c.isprintable() else '.' for c in text)}"

    @property
    def moved_to(self) -> str:
        """Return where the server is now and what to do, empty where it is here."""
        where = "".join(c if c.isprintable() else "." for c in self.location[:200])
        return f"moved to {where}: set RANKSCOPE_SERVER" if where else ""


class Client:
    """Requests to one server, one at a time over one kept connection.

    Redirects of a GET are followed, the token stays behind where they lead to another host.
    `timeout_seconds` is the limit of connecting and of each wait for the server; a request has so
    long altogether and the time that its body and the largest answer take on a slow link.
    Proxies come from the environment. `check_peer` gets the IP address of a connection before
    anything is sent, and raises HttpError to refuse it; a proxy decides for itself.
    Raises AddressError for an address that is none.
    """

    def __init__(
        self,
        server: str | Address,
        token: str = "",
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        program: str = "rankscope",
        environ: Mapping[str, str] = os.environ,
        check_peer: Callable[[str], None] | None = None,
    ) -> None:
        self.address = read_address(server) if isinstance(server, str) else server
        self._token = token.strip()  # of a file it has a line end
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self._program = program
        self._environ = environ
        self._check_peer = check_peer
        self._proxy = proxy_of(self.address, environ)
        self._pool: HTTPConnectionPool | None = None
        self._connection: Any = None  # the newest
        self._socket: Any = None  # of the newest
        self._send_seconds = timeout_seconds
        self._deadline = inf  # of the request in progress, monotonic
        self._closings = 0

    @property
    def route(self) -> str:
        """Return where requests go, with the proxy between."""
        to = self.address.origin + self.address.prefix
        return to if self._proxy is None else f"{to} through the proxy {self._proxy.shown}"

    def request(
        self, method: str, path: str, body: bytes | None = None,
        headers: Mapping[str, str] | None = None, *, token: str = "", timeout_seconds: float = 0.0,
        is_cut: bool = False,
    ) -> HttpAnswer:  # fmt: skip
        """Send a request and return the answer. Raises HttpError.

        A kept connection that the server closed meanwhile is tried anew once. `token` takes the
        place of the client's, `timeout_seconds` of its time limit. An answer that is too long is an
        error, or `is_cut`.
        """
        fields = {"Accept-Encoding": "gzip"} | self._headers(token) | dict(headers or {})
        timeout_seconds = timeout_seconds or self._timeout_seconds
        with self._open(
            method, path, body, fields, timeout_seconds, self._max_answer_bytes
        ) as response:
            is_error = response.status >= 400
            limit = min(_MAX_ERROR_BYTES, self._max_answer_bytes)
            most_bytes = limit if is_error else self._max_answer_bytes
            data = _read(response, most_bytes, is_error or is_cut)
            return HttpAnswer(response.status, data, _retry_after(response), _location(response))

    def download(self, path: str, target: Path) -> HttpAnswer:
        """Write the body of an answer to a file, of any size; return an answer without body.

        Where the status is an error, nothing is written. Raises HttpError, OSError for the file.
        """
        with self._open("GET", path, None, self._headers(""), self._timeout_seconds) as response:
            if response.status != 200:
                return HttpAnswer(response.status, _read(response, _MAX_ERROR_BYTES, True))
            with target.open("wb") as file:
                for block in response.stream(_BLOCK_BYTES, decode_content=False):
                    file.write(block)
            return HttpAnswer(response.status, b"")

    def close(self) -> None:
        """Close the connection, from any thread: a request that waits fails at once."""
        self._closings += 1
        self._connection, pool, self._pool = None, self._pool, None
        # Not that of the connection: it gives its socket away to an answer that ends with it.
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if pool is not None:
            pool.close()

    def _headers(self, token: str) -> dict[str, str]:
        token = token.strip() or self._token
        if not token.isprintable():
            raise HttpError("a control character is in the token; set RANKSCOPE_TOKEN without it")
        headers = {"User-Agent": self._program}
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str],
        timeout_seconds: float, max_answer_bytes: float = inf,
    ) -> Iterator[urllib3.BaseHTTPResponse]:  # fmt: skip
        """Yield the answer after all redirects; its connection is kept once it is read."""
        seconds = timeout_seconds + max_answer_bytes / _SLOWEST_BYTES_PER_SECOND
        client, url = self, self.address.origin + self.address.prefix + path
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                client._deadline = time.monotonic() + seconds + _seconds_of(body)
                response = client._send(method, url, body, headers, timeout_seconds)
                try:
                    location = _location(response)
                    if method != "GET" or not location:
                        with _plain_errors():
                            yield response
                        return
                finally:
                    response.close()  # of one that was read to its end the connection is kept
                url = urljoin(url, location)
                if client is not self:
                    client.close()
                client, headers = self._towards(url, headers)
            raise HttpError(f"more than {_MAX_REDIRECTS} redirects, the last one to {url}")
        finally:
            if client is not self:
                client.close()

    def _towards(self, url: str, headers: dict[str, str]) -> tuple[Client, dict[str, str]]:
        """Return the client for the target of a redirect, and what may be sent there."""
        try:
            target = read_address(url)
            if target.origin == self.address.origin:
                return self, headers
            other = Client(
                replace(target, prefix=""), timeout_seconds=self._timeout_seconds,
                program=self._program, environ=self._environ, check_peer=self._check_peer,
            )  # fmt: skip
        except AddressError as error:
            raise HttpError(f"redirected to {url!r}, which is no address of a server") from error
        if not _is_same_server(self.address, target):
            headers = {name: headers[name] for name in headers if name != "Authorization"}
        return other, headers

    def _send(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str],
        timeout_seconds: float,
    ) -> urllib3.BaseHTTPResponse:  # fmt: skip
        is_kept, closings = self._connection is not None, self._closings
        while True:
            try:
                with _plain_errors():
                    return self._send_once(method, url, body, headers, timeout_seconds)
            except HttpError as error:
                was_closed = closings != self._closings  # by another thread
                self.close()
                if not is_kept or was_closed or error.is_timeout:
                    raise
                is_kept, closings = False, self._closings

    def _send_once(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str],
        timeout_seconds: float,
    ) -> urllib3.BaseHTTPResponse:  # fmt: skip
        pool = self._pool = self._pool or self._make_pool()
        parts = urlsplit(url)._replace(fragment="")
        if self._proxy is None or self.address.scheme == "https":
            parts = parts._replace(scheme="", netloc="")
        self._send_seconds = timeout_seconds + _seconds_of(body)
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(self._send_seconds)
        limits = urllib3.Timeout(connect=timeout_seconds, read=self._send_seconds)
        return pool.urlopen(
            method, parts.geturl() or "/", body, headers, retries=False, redirect=False,
            assert_same_host=False, timeout=limits, preload_content=False, decode_content=False,
        )  # fmt: skip

    def _make_pool(self) -> HTTPConnectionPool:
        """Return the pool of the one connection; it records each that it opens, for `close`."""
        context = self._trust()
        if self._proxy is None:
            manager = urllib3.PoolManager(num_pools=1, ssl_context=context)
        else:
            headers = self._proxy.headers
            manager = urllib3.ProxyManager(
                self._proxy.url, num_pools=1, proxy_headers=headers, ssl_context=context
            )
        address = self.address
        pool = manager.connection_from_host(address.host, address.port, address.scheme)
        pool.ConnectionCls = _recording(pool.ConnectionCls, self)
        return pool

    def _trust(self) -> ssl.SSLContext | None:
        """Return what a server's certificate is checked with; None: as the system does."""
        path = self._environ.get(CA_VARIABLE, "")
        if not path or self.address.scheme != "https":
            return None
        context = create_urllib3_context()
        context.load_default_certs()
        try:
            context.load_verify_locations(path)
        except OSError as error:  # an SSLError too, of a file that holds no certificates
            raise HttpError(
                f"{CA_VARIABLE}={path}: {error}; name a file of certificates"
            ) from error
        return context

    def _opened(self, connection: Any) -> None:
        self._connection, self._socket = connection, connection.sock
        if self._check_peer is not None and self._proxy is None:
            self._check_peer(str(connection.sock.getpeername()[0]))
        connection.sock.settimeout(self._send_seconds)


def get(
    server: str, path: str, token: str = "", *, timeout_seconds: float = TIMEOUT_SECONDS,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> HttpAnswer:  # fmt: skip
    """Ask once and close the connection. Raises HttpError, AddressError."""
    client = Client(
        server, token, timeout_seconds=timeout_seconds, max_answer_bytes=max_answer_bytes
    )
    with contextlib.closing(client):
        return client.request("GET", path)


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text is, empty where it is none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _recording(kind: Any, client: Client) -> Any:
    """Return the kind of connection whose opening and reading `client` watches."""

    class Recording(kind):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            client._opened(self)

        def response_class(self, sock: Any, *arguments: Any, **options: Any) -> Any:
            response = http.client.HTTPResponse(sock, *arguments, **options)
            response.fp = io.BufferedReader(
                _Timed(response.fp.detach(), sock, lambda: client._deadline)
            )
            return response

    return Recording


class _Timed(io.RawIOBase):
    """Reads from a socket until a deadline: a server that sends byte by byte resets each limit."""

    def __init__(self, raw: Any, sock: Any, deadline: Callable[[], float]) -> None:
        self._raw, self._socket, self._deadline = raw, sock, deadline
        self._wait_seconds: float = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left = self._deadline() - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer is not complete in time")
        self._socket.settimeout(min(self._wait_seconds, left))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _seconds_of(body: bytes | None) -> float:
    return len(body or b"") / _SLOWEST_BYTES_PER_SECOND


def _location(response: urllib3.BaseHTTPResponse) -> str:
    """Return where a redirect leads, empty where it is none."""
    return response.headers.get("Location", "") if response.status in _REDIRECTS else ""


def _is_same_server(before: Address, after: Address) -> bool:
    """Return whether a redirect only leads from HTTP to HTTPS, each at its usual port."""
    ways = (before.scheme, before.port, after.scheme, after.port)
    return before.host == after.host and ways == ("http", 80, "https", 443)


def _retry_after(response: urllib3.BaseHTTPResponse) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _read(response: urllib3.BaseHTTPResponse, max_bytes: int, is_cut: bool) -> bytes:
    """Return the unpacked body. Raises HttpError where it is longer, unless it may be cut."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    unpacker = zlib.decompressobj(wbits=31) if encoding in ("gzip", "x-gzip") else None
    if unpacker is None and encoding not in ("", "identity") and not is_cut:
        raise HttpError(f"the answer is packed with {encoding[:40]!r}, which was not asked for")
    body, is_packed = bytearray(), False
    for block in response.stream(_BLOCK_BYTES, decode_content=False):
        if unpacker is not None:
            is_packed = True
            try:
                block = unpacker.decompress(block, max_bytes + 1 - len(body))
            except zlib.error as error:
                raise HttpError(f"the answer's gzip is damaged: {error}") from error
        body += block
        if len(body) > max_bytes:
            if is_cut:
                return bytes(body[:max_bytes])
            raise HttpError(f"the answer has more than {max_bytes} bytes")
    if is_packed and unpacker is not None and not unpacker.eof and not is_cut:
        raise HttpError("the answer's gzip is cut short")
    return bytes(body)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what urllib3 raises into HttpError with words for people."""
    try:
        yield
    except (HTTPError, ValueError) as error:  # ValueError: what no line of a request can hold
        raise HttpError(_words_of(error), is_timeout=_is_timeout(error)) from error


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, HttpTimeout) and not isinstance(error, NewConnectionError)


def _words_of(error: BaseException) -> str:
    """Return the reason at the bottom: urllib3 wraps it with the objects that it uses."""
    if _is_timeout(error):
        return "timed out"
    if isinstance(error, ProxyError):
        return f"the proxy: {_words_of(error.original_error)}"
    inner = error.__cause__ if isinstance(error, HTTPError) else None
    if inner is None and isinstance(error, ProtocolError) and len(error.args) > 1:
        inner = error.args[1]
    if inner is None:
        return str(error) or type(error).__name__
    return _words_of(inner)
