"""Requests to the outside: which addresses are asked, limits, and what an answer means."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import rankscope
from rankscope.address import AddressError
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope_server.alerts.message import plain
from rankscope_server.preflight.targets import Network, Policy, address_of, is_listed, refusal

TIMEOUT_SECONDS = 10.0  # without any byte
DEADLINE_SECONDS = 20.0  # of a whole request, however slowly bytes come
MAX_ANSWER_BYTES = 64 << 10
_AGAIN = frozenset({408, 425, 429})
_MOST_ERROR, _MOST_READ = 300, 4_096
# It logs the path of each request, which holds the secret of most channels.
logging.getLogger("urllib3.connectionpool").setLevel(logging.INFO)


class DeliveryError(Exception):
    """A message did not arrive. `is_final`: to send it again would not help."""

    def __init__(
        self, text: str, *, is_final: bool = False, retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(text)
        self.is_final, self.retry_after_seconds = is_final, retry_after_seconds


@dataclass(frozen=True, slots=True)
class Outbound:
    """What this server may ask, and what its own address is for people."""

    public_url: str = ""
    networks: tuple[Network, ...] = ()  # if there are any, no other address is asked
    has_own_host: bool = False  # it listens on loopback alone, so what is there is not protected

    def refusal(self, address: str) -> str:
        """Return why an IP address is not asked, empty where it may be."""
        found = address_of(address)
        if found is not None and is_listed(found, Policy(self.networks)):
            return ""
        if self.networks:
            return "it is outside of alert_networks of this server"
        return refusal(address, Policy((), self.has_own_host))

    def check_peer(self, address: str) -> None:
        """Raise HttpError where a connection leads to an address that is not asked."""
        why = self.refusal(address.partition("%")[0])
        if why:
            raise RefusedPeerError(f"{address} is not asked: {why}")


class RefusedPeerError(HttpError):
    """The address is one that this server does not talk to."""


def post(url: str, body: bytes, headers: Mapping[str, str], outbound: Outbound) -> HttpAnswer:
    """Send a body; a redirect is not followed. Raises DeliveryError."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        client = Client(
            f"{parts.scheme}://{parts.netloc}", timeout_seconds=TIMEOUT_SECONDS,
            max_answer_bytes=MAX_ANSWER_BYTES, program=f"rankscope/{rankscope.__version__}",
            check_peer=outbound.check_peer,
        )  # fmt: skip
    except AddressError as error:
        raise DeliveryError("the address of the channel is none", is_final=True) from error
    with contextlib.closing(client):
        try:
            if address_of(client.address.host) is not None:
                outbound.check_peer(client.address.host)  # behind a proxy too
            with deadline(client.close, DEADLINE_SECONDS):
                answer = client.request("POST", path, body, headers, is_cut=True)
        except HttpError as error:
            raise DeliveryError(str(error), is_final=isinstance(error, RefusedPeerError)) from error
    return _checked(answer)


def _checked(answer: HttpAnswer) -> HttpAnswer:
    """Return an answer that took the message. Raises DeliveryError for any other."""
    if 200 <= answer.status < 300:
        return answer
    if 300 <= answer.status < 400:
        raise DeliveryError(
            f"HTTP {answer.status}: it redirects, which is not followed; set its final address",
            is_final=True,
        )
    # Whole words: what the receiver repeats of a secret is taken out before it is cut.
    text = answer.body[:_MOST_READ].decode("utf-8", "replace")
    raise DeliveryError(
        f"HTTP {answer.status}: {text}".removesuffix(": "),
        is_final=answer.status < 500 and answer.status not in _AGAIN,
        retry_after_seconds=answer.retry_after_seconds,
    )


@contextlib.contextmanager
def deadline(end: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `end`, which closes a connection, where what is done takes longer.

    Raises DeliveryError then.
    """
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        end()

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if is_late.is_set():
            raise DeliveryError(f"it did not end within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return a text of one line, not long, and without any of the secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return plain(text, _MOST_ERROR)
