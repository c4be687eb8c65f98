"""Ports of this node: what is taken, by whom, and which range is handed out."""

from __future__ import annotations

import time

import msgspec

from rankscope.preflight.facts import processes, rules
from rankscope.preflight.facts.processes import Leftover
from rankscope.preflight.facts.rules import FilterRules
from rankscope.preflight.system import System


class PortOwner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who holds a port. pid 0: a process that this user may not see."""

    port: int
    pid: int = 0
    command: str = ""
    user: str = ""
    age_s: float = 0.0
    is_launcher: bool = False  # the launcher that started this preflight: it will let go, or share


class PortFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ports as the kernel of this node sees them."""

    range_low: int = 0  # ip_local_port_range
    range_high: int = 0
    master_busy: PortOwner | None = None  # None: MASTER_PORT could be bound here
    num_time_wait: int = -1
    conntrack_count: int = -1
    conntrack_max: int = -1
    leftovers: tuple[Leftover, ...] = ()
    rules: FilterRules | None = None  # None: this user may not read them, or not all of them


def collect(
    system: System, master_port: int, is_master: bool, since_unix_s: float | None = None
) -> PortFacts:
    """Read the port tables. Processes older than `since_unix_s` (now) may be left over."""
    low, high = range_of(system) or (0, 0)
    busy = owner_of(system, master_port) if is_master else None
    return PortFacts(
        range_low=low,
        range_high=high,
        master_busy=busy if busy is not None and busy.pid != processes.own_pid() else None,
        num_time_wait=_time_wait(system),
        conntrack_count=_number(system, "nf_conntrack_count"),
        conntrack_max=_number(system, "nf_conntrack_max"),
        leftovers=processes.leftovers(system, since_unix_s or time.time()),
        rules=rules.collect(system),
    )


def owner_of(system: System, port: int) -> PortOwner | None:
    """Return who listens on `port`; pid 0 if this user may not see; None if no process does."""
    sockets = [row for row in processes.listening(system) if row.port == port]
    if not sockets:
        return None
    inodes = {row.inode for row in sockets}
    everything = {process.pid: process for process in processes.visible(system)}
    for process in everything.values():
        if inodes & processes.socket_inodes(system, process.pid):
            return PortOwner(
                port=port,
                pid=process.pid,
                command=process.command,
                user=process.user,
                age_s=process.age_s,
                is_launcher=process.pid in processes.launchers(everything),
            )
    return PortOwner(port=port, user=sockets[0].user)


def range_of(system: System) -> tuple[int, int] | None:
    """Return the first and the last port that the kernel hands out; None if it does not say."""
    words = (system.read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(words) == 2 and all(word.isdigit() for word in words):
        return int(words[0]), int(words[1])
    return None


def reserved_of(system: System) -> tuple[tuple[int, int], ...]:
    """Return the ports that the kernel never hands out, as (first, last)."""
    found = []
    for part in (system.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.append((int(first), int(last or first)))
    return tuple(found)


def _time_wait(system: System) -> int:
    for line in (system.read("/proc/net/sockstat") or "").splitlines():
        words = line.split()
        if words[:1] == ["TCP:"] and "tw" in words[:-1]:
            return int(words[words.index("tw") + 1])
    return -1


def _number(system: System, name: str) -> int:
    value = system.read_int(f"/proc/sys/net/netfilter/{name}")
    return value if value is not None else -1
