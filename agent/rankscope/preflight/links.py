"""Interfaces as the kernel shows them to this process, whatever /sys is mounted.

getifaddrs and the interface ioctls answer for the network namespace of the caller; /sys/class/net
answers for the one that it was mounted in, which in containers is often another.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Link:
    """One interface; `addresses` in the order of getifaddrs, IPv4 first."""

    name: str
    addresses: tuple[str, ...] = ()  # with prefix length, without scope: "10.0.0.5/24"
    flags: tuple[str, ...] = ()  # "up", "running", "loopback", ...
    mtu_bytes: int = 0
    speed_mbit: int = 0
    duplex: str = ""
    num_errors: int = 0
    num_drops: int = 0
    num_packets: int = 0
    mac: str = ""


def read_links() -> tuple[Link, ...]:
    """Ask the kernel. Interfaces without an address are there, too."""
    addresses, counters = psutil.net_if_addrs(), psutil.net_io_counters(pernic=True, nowrap=False)
    states = psutil.net_if_stats()
    links = []
    for name in dict.fromkeys([*addresses, *states]):
        state, count = states.get(name), counters.get(name)
        macs = [row.address for row in addresses.get(name, ()) if row.family == psutil.AF_LINK]
        texts = [_with_prefix(row.address, row.netmask) for row in addresses.get(name, ())
                 if row.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
        links.append(
            Link(
                name=name,
                addresses=tuple(filter(None, texts)),
                flags=tuple(state.flags.split(",")) if state is not None else (),
                mtu_bytes=state.mtu if state is not None else 0,
                speed_mbit=state.speed if state is not None else 0,
                duplex=_DUPLEX.get(int(state.duplex), "") if state is not None else "",
                num_errors=count.errin + count.errout if count is not None else 0,
                num_drops=count.dropin + count.dropout if count is not None else 0,
                num_packets=count.packets_recv + count.packets_sent if count is not None else 0,
                mac=macs[0].lower() if macs else "",
            )
        )
    return tuple(links)


_DUPLEX = {int(psutil.NIC_DUPLEX_FULL): "full", int(psutil.NIC_DUPLEX_HALF): "half"}


def _with_prefix(address: str, netmask: str | None) -> str:
    """Return "10.0.0.5/24"; "" for what cannot be read as an address."""
    try:
        own = ipaddress.ip_address(address.partition("%")[0])
        length = int(ipaddress.ip_address(netmask)).bit_count() if netmask else own.max_prefixlen
    except ValueError:
        return ""
    return f"{own}/{length}"
