"""Datagrams that are answered only if they prove the run's secret, and answers that prove it too.

A probe is a nonce, a tag, and what fills it up; an answer repeats the nonce and says how many bytes
came, and how many probes of that series so far, which shows which way the others were lost. It is
shorter than any probe, so that a forged sender's address gains nothing, and who repeats
a recorded probe gets only what was answered before.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass
from typing import cast

from rankscope.preflight.key import RunKey, tag

_NONCE_BYTES, _TAG_BYTES, _SIZE_BYTES = 8, 16, 8
LEAST_BYTES = _NONCE_BYTES + _TAG_BYTES + _SIZE_BYTES
UNCOUNTED = 1 << 31  # probes of this number and above only ask how many have come
MAX_SERIES, MAX_OF_ONE = 4096, 4096  # that are counted; two of each peer, 400 and some


@dataclass(frozen=True)
class Answer:
    """What the far end says of one probe."""

    number: int
    size_bytes: int
    num_arrived: int  # probes of the same series, this one included


class Probes:
    """The datagrams of one measurement, numbered, and the answers that came to them."""

    def __init__(self, key: RunKey) -> None:
        self._key = key.derived("datagrams")
        self._series = secrets.token_bytes(_NONCE_BYTES // 2)

    def probe(self, number: int, size_bytes: int) -> bytes:
        """Return the datagram of that number, filled up to `size_bytes`."""
        nonce = self._series + number.to_bytes(_NONCE_BYTES // 2, "big")
        return (nonce + _mark(self._key, "probe", nonce)).ljust(size_bytes, b"\0")

    def answered(self, data: bytes) -> Answer | None:
        """Return what an answer says; None if it is none of ours."""
        nonce, mark, size = _parts(data)
        is_ours = len(data) == LEAST_BYTES and nonce.startswith(self._series)
        if not is_ours or not hmac.compare_digest(mark, _mark(self._key, "answer", nonce, size)):
            return None
        half = _NONCE_BYTES // 2
        size_bytes, num_arrived = int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
        return Answer(int.from_bytes(nonce[half:], "big"), size_bytes, num_arrived)


class Acknowledger(asyncio.DatagramProtocol):
    """Answers a probe with its size; a datagram without the run's proof gets nothing."""

    def __init__(self, key: RunKey) -> None:
        self._key = key.derived("datagrams")
        self._transport: asyncio.DatagramTransport | None = None
        self._arrived: dict[bytes, set[int]] = {}  # numbers by series

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Acknowledge."""
        nonce, mark, _ = _parts(data)
        if len(data) < LEAST_BYTES or self._transport is None:
            return
        if hmac.compare_digest(mark, _mark(self._key, "probe", nonce)):
            size = len(data).to_bytes(4, "big") + self._count(nonce).to_bytes(4, "big")
            self._transport.sendto(nonce + _mark(self._key, "answer", nonce, size) + size, addr)

    def _count(self, nonce: bytes) -> int:
        """Return how many probes of this series have come; a repeated one is one."""
        half = _NONCE_BYTES // 2
        series, number = nonce[:half], int.from_bytes(nonce[half:], "big")
        while len(self._arrived) >= MAX_SERIES and series not in self._arrived:
            del self._arrived[next(iter(self._arrived))]
        numbers = self._arrived.setdefault(series, set())
        if number < UNCOUNTED and len(numbers) < MAX_OF_ONE:
            numbers.add(number)
        return len(numbers)


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    end = _NONCE_BYTES + _TAG_BYTES
    return data[:_NONCE_BYTES], data[_NONCE_BYTES:end], data[end:LEAST_BYTES]


def _mark(key: bytes, *parts: bytes | str) -> bytes:
    return tag(key, *parts)[:_TAG_BYTES]
