"""InfiniBand and RoCE ports, from /sys/class/infiniband."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.system import System

if TYPE_CHECKING:
    from rankscope.preflight.options import Options

_ROOT = "/sys/class/infiniband"
_MAX_PORTS, _MAX_GIDS = 64, 32
_NO_GID = re.compile(r"^(0000:){7}0000$")
_COUNTERS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_xmit_discards",
)  # fmt: skip
_LIBRARY_FOLDERS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
                    "/lib/x86_64-linux-gnu", "/lib64", "/usr/local/lib")  # fmt: skip


class Gid(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a port's table of addresses."""

    index: int
    gid: str
    kind: str = ""  # "RoCE v2", "IB/RoCE v1"
    interface: str = ""


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One port of an adapter. Empty and 0: it does not say."""

    device: str
    number: int
    state: str = ""  # ACTIVE, DOWN, INIT, ARMED
    phys_state: str = ""  # LinkUp, Polling, Disabled
    rate_gbit: float = 0.0
    rate: str = ""  # "400 Gb/sec (4X NDR)"
    link_layer: str = ""  # InfiniBand, Ethernet
    gids: tuple[Gid, ...] = ()
    interface_mtu_bytes: int = 0  # of the network interface of a RoCE port
    counters: dict[str, int] = {}
    errors_during: dict[str, int] = {}  # how far counters went while this preflight ran

    @property
    def name(self) -> str:
        """Return adapter and port as NCCL_IB_HCA writes them."""
        return f"{self.device}:{self.number}"


class RdmaFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """InfiniBand and RoCE ports, and whether this user may use them."""

    ports: tuple[RdmaPort, ...] = ()
    verbs: dict[str, str] = {}  # adapter: "" if its device opens, else why not
    has_library: bool = False  # libibverbs.so.1
    hca_filter: str = ""  # NCCL_IB_HCA
    gid_index: int | None = None  # NCCL_IB_GID_INDEX


def collect(system: System, options: Options | None = None) -> RdmaFacts:
    """Read all ports; nothing is sent."""
    devices = system.names(_ROOT)
    ports = [
        _port(system, device, int(number))
        for device in devices
        for number in system.names(f"{_ROOT}/{device}/ports")
        if number.isdigit()
    ]
    if not ports:
        return RdmaFacts()
    index = system.environ.get("NCCL_IB_GID_INDEX", "")
    return RdmaFacts(
        ports=tuple(ports[:_MAX_PORTS]),
        verbs=_verbs(system, devices),
        has_library=_has_library(system),
        hca_filter=system.environ.get("NCCL_IB_HCA", ""),
        gid_index=int(index) if index.lstrip("-").isdigit() else None,
    )


def again(system: System, facts: RdmaFacts) -> RdmaFacts:
    """Return `facts` with how far the error counters went since; to be called at the end."""
    ports = []
    for port in facts.ports:
        now = _counters(system, port.device, port.number)
        grown = {name: now[name] - old for name, old in port.counters.items() if name in now}
        during = {name: change for name, change in grown.items() if change > 0}
        ports.append(msgspec.structs.replace(port, errors_during=during))
    return msgspec.structs.replace(facts, ports=tuple(ports))


def _port(system: System, device: str, number: int) -> RdmaPort:
    folder = f"{_ROOT}/{device}/ports/{number}"
    rate = (system.read(f"{folder}/rate") or "").strip()
    gbit = re.match(r"[\d.]+", rate)
    gids = tuple(_gids(system, folder))
    interface = next((gid.interface for gid in gids if gid.interface), "")
    mtu = system.read_int(f"/sys/class/net/{interface}/mtu") if interface else None
    return RdmaPort(
        device=device,
        number=number,
        state=_word(system.read(f"{folder}/state")),
        phys_state=_word(system.read(f"{folder}/phys_state")),
        rate_gbit=float(gbit.group(0)) if gbit else 0.0,
        rate=rate,
        link_layer=(system.read(f"{folder}/link_layer") or "").strip(),
        gids=gids,
        interface_mtu_bytes=mtu or 0,
        counters=_counters(system, device, number),
    )


def _gids(system: System, folder: str) -> list[Gid]:
    found = []
    numbers = sorted(int(name) for name in system.names(f"{folder}/gids") if name.isdigit())
    for number in numbers[:_MAX_GIDS]:
        gid = (system.read(f"{folder}/gids/{number}") or "").strip()
        if not gid or _NO_GID.match(gid):
            continue
        kind = (system.read(f"{folder}/gid_attrs/types/{number}") or "").strip()
        interface = (system.read(f"{folder}/gid_attrs/ndevs/{number}") or "").strip()
        found.append(Gid(index=number, gid=gid, kind=kind, interface=interface))
    return found


def _counters(system: System, device: str, number: int) -> dict[str, int]:
    folder = f"{_ROOT}/{device}/ports/{number}/counters"
    values = {name: system.read_int(f"{folder}/{name}") for name in _COUNTERS}
    return {name: value for name, value in values.items() if value is not None}


def _verbs(system: System, devices: list[str]) -> dict[str, str]:
    """Return for each adapter why its device file cannot be opened; empty: it can."""
    found = {}
    for name in system.names("/sys/class/infiniband_verbs"):
        device = (system.read(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip()
        if device in devices:
            found[device] = system.why_closed(f"/dev/infiniband/{name}")
    return found


def _has_library(system: System) -> bool:
    folders = [*system.environ.get("LD_LIBRARY_PATH", "").split(":"), *_LIBRARY_FOLDERS]
    return any("libibverbs.so.1" in system.names(folder) for folder in folders if folder)


def _word(text: str | None) -> str:
    """Return the word of "4: ACTIVE"."""
    return (text or "").partition(":")[2].strip()
