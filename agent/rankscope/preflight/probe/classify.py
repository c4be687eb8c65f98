"""How an attempt to connect ended, told from its errno and the time it took.

Measured in the laboratory on Linux 6.18: a reset and an ICMP port-unreachable come as ECONNREFUSED
within 2 ms, admin-prohibited as EHOSTUNREACH within 2 ms, an address that nobody on the link has
as EHOSTUNREACH after 3.06 s (three unanswered ARP requests).
"""

from __future__ import annotations

import errno as codes

from rankscope.preflight.facts.edges import DialClass

ARP_GAVE_UP_MS = 1_000.0  # between the two kinds of EHOSTUNREACH: 1.5 ms and 3,060 ms
_BY_ERRNO: dict[int, DialClass] = {
    codes.ECONNREFUSED: "refused",
    codes.ECONNRESET: "refused",
    codes.ETIMEDOUT: "drop",
    codes.ENETUNREACH: "no-route",
    codes.EADDRNOTAVAIL: "no-route",
    codes.EAFNOSUPPORT: "no-route",
    codes.EINVAL: "no-route",
    codes.EPERM: "local-firewall",
    codes.EACCES: "local-firewall",
}


def classify(errno: int | None, elapsed_ms: float) -> DialClass:
    """Return the class of a dial that failed; `errno` None: it was cut at its limit."""
    if errno is None:
        return "drop"
    if errno in (codes.EHOSTUNREACH, codes.EHOSTDOWN):
        return "no-arp" if elapsed_ms > ARP_GAVE_UP_MS else "prohibited"
    return _BY_ERRNO.get(errno, "error")
