"""Free ports of this machine, for what is told its port before it listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """Return a free TCP port that the kernel gives to nobody who does not ask for it by number.

    One from `bind(0)` is of the range from which every outgoing connection gets its own, so that
    anybody may have taken it before the test does.
    """
    highest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    ports = range(_LOWEST, highest) if highest > _LOWEST else range(61_000, 65_535)
    for port in random.sample(ports, k=min(100, len(ports))):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"100 ports of {ports} are taken")
