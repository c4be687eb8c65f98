"""Interfaces: what there is, and which of them gloo and NCCL will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.facts import choice
from rankscope.preflight.facts.choice import Choice

if TYPE_CHECKING:
    from rankscope.preflight.links import Link
    from rankscope.preflight.system import System


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
    num_packets: int = 0  # rx + tx since boot: what the errors are compared with
    rp_filter: int = -1  # the effective one: max of all and its own
    mac: str = ""


class InterfaceFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All interfaces, and the choice of each library."""

    interfaces: tuple[Interface, ...] = ()
    gloo: tuple[Choice, ...] = ()  # emulated; several with a list in GLOO_SOCKET_IFNAME
    nccl: tuple[Choice, ...] = ()
    gc_thresh3: int = 0
    hop_limit: int = 0  # of the IPv4 packets that this node sends; 0: not known


# names of interfaces that software makes; a plain "br0" is none: it is often a host's only way out
_KINDS = (
    ("docker", "docker"), ("br-", "docker bridge"), ("virbr", "libvirt bridge"), ("veth", "veth"),
    ("cni", "container network"), ("flannel", "container network"), ("cali", "container network"),
    ("cilium", "container network"), ("lxc", "container network"), ("lxd", "container network"),
    ("kube-", "container network"), ("podman", "podman"), ("tailscale", "vpn"), ("wg", "vpn"),
    ("zt", "vpn"), ("tun", "vpn"), ("nerdctl", "container network"), ("dummy", "dummy"),
    ("tmfifo", "link to a DPU"),
)  # fmt: skip


def kind_of(name: str) -> str:
    """Return why an interface of this name is no real one; "" if it may be real."""
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), "")


def collect(system: System) -> InterfaceFacts:
    """Read all interfaces and work out which of them gloo and NCCL will take."""
    links = system.links()
    # /sys may be of another network namespace: then it shows other interfaces
    in_sysfs = set(system.names("/sys/class/net"))
    has_sysfs = {link.name for link in links} == in_sysfs - {"bonding_masters"}
    return InterfaceFacts(
        interfaces=tuple(_interface(system, link, has_sysfs) for link in links),
        gloo=choice.gloo(system, links),
        nccl=choice.nccl(system, links),
        gc_thresh3=system.read_int("/proc/sys/net/ipv4/neigh/default/gc_thresh3") or 0,
        hop_limit=system.read_int("/proc/sys/net/ipv4/ip_default_ttl") or 0,
    )


def _interface(system: System, link: Link, has_sysfs: bool) -> Interface:
    about = f"/sys/class/net/{link.name}"
    changes = system.read_int(f"{about}/carrier_changes") if has_sysfs else None
    slaves = system.read(f"{about}/bonding/slaves") if has_sysfs else None
    return Interface(
        name=link.name,
        addresses=link.addresses,
        mtu_bytes=link.mtu_bytes,
        is_up="up" in link.flags,
        has_carrier="running" in link.flags if link.flags else None,
        speed_mbit=link.speed_mbit,
        duplex=link.duplex,
        kind=kind_of(link.name),
        is_loopback="loopback" in link.flags or link.name == "lo",
        bond_slaves=tuple((slaves or "").split()),
        carrier_changes=changes if changes is not None else -1,
        num_errors=link.num_errors,
        num_drops=link.num_drops,
        num_packets=link.num_packets,
        rp_filter=_rp_filter(system, link.name),
        mac=link.mac,
    )


def _rp_filter(system: System, name: str) -> int:
    """Return the effective value: the kernel takes the larger of "all" and the interface's own."""
    values = [
        system.read_int(f"/proc/sys/net/ipv4/conf/{part}/rp_filter") for part in ("all", name)
    ]
    known = [value for value in values if value is not None]
    return max(known) if known else -1
