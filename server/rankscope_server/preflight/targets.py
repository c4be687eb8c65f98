"""Which addresses the server may dial: never a free target, never itself, never the metadata."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import psutil

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
LEAST_PORT = 1_024  # agents listen above: they run without root

# Services of clouds that answer at an address of their own, beside 169.254.169.254.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "100.100.100.200",  # Alibaba Cloud
        "168.63.129.16",  # Azure wire server
        "192.0.0.192",  # Oracle Cloud, the old one
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google Cloud
    )
)
# Addresses that hold another one, which is not known.
_TUNNELS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")  # Linux takes 0.0.0.0 for loopback


def own_addresses() -> frozenset[Address]:
    """Return the addresses of this machine, as they are now."""
    found = (row.address for rows in psutil.net_if_addrs().values() for row in rows)
    plain = (address_of(text.partition("%")[0]) for text in found)
    return frozenset(address for address in plain if address is not None)


@dataclass(frozen=True)
class Policy:
    """What the operator allows; `has_own_host`: the server listens on loopback alone."""

    networks: tuple[Network, ...] = ()
    has_own_host: bool = False
    own: Callable[[], frozenset[Address]] = own_addresses


def address_of(text: str) -> Address | None:
    """Return the address in a text, IPv4 in IPv6 unpacked; None for names and zones."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return None
        return found.ipv4_mapped or found
    return found


def refusal(text: str, policy: Policy) -> str:
    """Return why an address is not dialled, empty where it may be."""
    address = address_of(text)
    if address is None:
        return "this is no plain address"
    if address.is_loopback:
        return "" if policy.has_own_host else "loopback is the server itself"
    if address in _METADATA:
        return "services of clouds answer there"
    if address.is_link_local:
        return "link-local: cloud metadata answers there"
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        return "this is no address of one machine"
    if address in _THIS_NETWORK:
        return "this is no address of one machine"
    if any(address in network for network in _TUNNELS):
        return "this address holds another one"
    is_own = not policy.has_own_host and address in policy.own()
    if is_own and not is_listed(address, policy):
        return "it is the server's own: list it in preflight_networks to allow that"
    if policy.networks and not is_listed(address, policy):
        return "it is outside of preflight_networks of the server"
    return ""


def is_listed(address: Address, policy: Policy) -> bool:
    """Return whether the operator listed a network that holds the address."""
    return any(address in network for network in policy.networks)


def port_refusal(port: int, declared: tuple[int, ...]) -> str:
    """Return why a port is not dialled, empty where it may be."""
    if port < LEAST_PORT:
        return f"ports below {LEAST_PORT} are never dialled"
    return "" if port in declared else "the node has not declared this port"
