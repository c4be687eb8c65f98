"""The address of a server as people write it, and the proxy on the way to it."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

_PORTS = {"http": 80, "https": 443}
_PROXY_PORT = 3128


class AddressError(ValueError):
    """This text is no address of a server, or of a proxy; the message says what to write."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `prefix` is the path below which it answers, with no slash at the end."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def origin(self) -> str:
        """Return scheme, host and port."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """Return the address for people and links: without the port that its scheme has anyway."""
        origin = self.origin.removesuffix(f":{_PORTS[self.scheme]}")
        return origin + self.prefix


def read_address(text: str) -> Address:
    """Return the address of a server: HOST:PORT or http[s]://HOST[:PORT][/PATH].

    Raises AddressError.
    """
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in _PORTS:
        raise AddressError(
            f"{text!r} is no address of a server: "
            "expected http://HOST:PORT in RANKSCOPE_SERVER or --server"
        )
    return Address(parts.scheme, host, port or _PORTS[parts.scheme], parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that the environment names."""

    url: str  # without user name and password
    variable: str
    headers: dict[str, str]

    @property
    def shown(self) -> str:
        """Return it for people."""
        return f"{self.url.partition('//')[2]} ({self.variable})"


def proxy_of(address: Address, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy on the way to an address, by the variables that curl reads too.

    Never for this machine itself. Raises AddressError.
    """
    own = f"{address.scheme}_proxy"
    for name in (own, own.upper(), "all_proxy", "ALL_PROXY"):
        value = environ.get(name, "")
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue  # in a CGI program it is a header that a stranger sent
        if value:
            return None if _is_direct(address, environ) else _read_proxy(name, value)
    return None


def _read_proxy(name: str, value: str) -> Proxy:
    try:
        parts = urlsplit(value if "//" in value else f"http://{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in _PORTS:
        raise AddressError(f"{name}={value!r}: set it to http://HOST:PORT; no other proxy is known")
    headers = {}
    if parts.username:
        words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(words.encode()).decode()}"
    url = f"{parts.scheme}://{_bracketed(host)}:{port or _PROXY_PORT}"
    return Proxy(url, name, headers)


def _is_direct(address: Address, environ: Mapping[str, str]) -> bool:
    """Return whether an address is this machine, or no_proxy names it.

    no_proxy holds names, which mean their subdomains too, addresses, networks, `*`.
    """
    ip, host = _ip(address.host), address.host.lower()
    if (ip is not None and ip.is_loopback) or host == "localhost" or host.endswith(".localhost"):
        return True
    words = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    return any(_names(word, host, ip, address.port) for word in re.split(r"[,\s]+", words.lower()))


def _names(
    word: str, host: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int
) -> bool:
    if ip is not None and "/" in word:
        try:
            return ip in ipaddress.ip_network(word, strict=False)
        except ValueError:
            return False
    name = word.lstrip("*").lstrip(".")
    spellings = {host, f"{_bracketed(host)}:{port}", _bracketed(host)}
    return word == "*" or (bool(name) and (name in spellings or host.endswith(f".{name}")))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
