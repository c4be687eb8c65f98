"""Wrong tokens: how many an address may try, and the lines of the audit log about them."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from rankscope_server.access.audit import Deed
from rankscope_server.access.roles import ALL_PROJECTS
from rankscope_server.limits import Buckets
from rankscope_server.problems import Problem

TRIES, TRY_AGAIN_S = 10, 10.0  # at once, then one each 10 s
SUMMED_UP_S = 60.0
MAX_ADDRESSES = 1_000  # whose failures are counted apart
_OTHERS = "others"


class Tries:
    """Limits guesses by address, in bounded memory. Use it in the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(clock)
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}  # since when, how many not written yet

    def begin(self, address: str) -> None:
        """Take one of the tries of an address. Raises Problem 429."""
        wait_s = self._buckets.wait_s(network_of(address), TRIES, 1 / TRY_AGAIN_S)
        if wait_s:
            raise Problem(
                429, "too many wrong tokens from this address", "Authorization",
                f"try again in {wait_s + 0.5:.0f} s with the right one", wait_s,
            )  # fmt: skip

    def was_right(self, address: str) -> None:
        """Give the try back."""
        self._buckets.give_back(network_of(address))

    def failed(self, address: str) -> Deed | None:
        """Count a failure; return what is to be written now: the first, then a sum a minute."""
        key = address if address in self._counts or self._has_room() else _OTHERS
        since, count = self._counts.get(key, (float("-inf"), 0))
        if self._clock() - since < SUMMED_UP_S:
            self._counts[key] = (since, count + 1)
            return None
        self._counts[key] = (self._clock(), 0)
        return _deed(key, count + 1)

    def rest(self) -> list[Deed]:
        """Return what was counted and not written, and count anew."""
        found = [_deed(key, count) for key, (_, count) in self._counts.items() if count]
        self._counts = {key: (since, 0) for key, (since, _) in self._counts.items()}
        return found

    def _has_room(self) -> bool:
        if len(self._counts) >= MAX_ADDRESSES:
            now = self._clock()
            self._counts = {
                key: (since, count)
                for key, (since, count) in self._counts.items()
                if count or now - since < SUMMED_UP_S
            }
        return len(self._counts) < MAX_ADDRESSES


def network_of(address: str) -> str:
    """Return what counts as one caller: an IPv4 address, the /64 of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


def _deed(address: str, count: int) -> Deed:
    return Deed(
        action="sign-in failed", who="unknown", project=ALL_PROJECTS, address=address, count=count
    )
