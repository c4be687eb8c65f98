"""Interfaces: what there is, and which of them gloo and NCCL will take."""

from __future__ import annotations

import msgspec


class Interface(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One network interface as the kernel shows it."""

    name: str
    addresses: tuple[str, ...] = ()  # with prefix length: "10.0.0.5/24"
    mtu_bytes: int = 0  # by SIOCGIFMTU
    is_up: bool = False
    has_carrier: bool | None = None
    speed_mbit: int = 0  # 0: the driver does not say
    duplex: str = ""
    kind: str = ""  # docker, bridge, veth, vpn, ...: why it is no real one; empty: real
    is_loopback: bool = False
    bond_slaves: tuple[str, ...] = ()
    carrier_changes: int = -1
    num_errors: int = 0  # rx + tx errors since boot
    num_drops: int = 0
    rp_filter: int = -1  # the effective one: max of all and its own


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The interface that a library takes, and by which of its rules."""

    interface: str = ""
    address: str = ""  # which it tells the others
    how: str = ""  # "GLOO_SOCKET_IFNAME=eth0", "the host name node1 resolves to it"
    problem: str = ""  # why it cannot be used: "no interface is named eth9"


class InterfaceFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All interfaces, and the choice of each library."""

    interfaces: tuple[Interface, ...] = ()
    gloo: tuple[Choice, ...] = ()  # emulated; several with a list in GLOO_SOCKET_IFNAME
    nccl: tuple[Choice, ...] = ()
    gc_thresh3: int = 0
