"""Names: what this node resolves itself and the master to."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Sequence

import msgspec

from rankscope.preflight.facts.endpoint import opens_store
from rankscope.preflight.system import Resolved, System

MAX_ASKED = 8  # peers whose names are asked for, all at once
REVERSE_LIMIT_S = 1.2  # more than dns.reverse calls slow; with the first answers under 4 s
_FIRST_LIMIT_MS = 2500.0  # a resolver that took longer need not be asked again


class HostsLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of /etc/hosts that names one of the nodes."""

    number: int
    text: str


class NameFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What names mean on this node."""

    hostname: str
    own: Resolved
    master: Resolved | None = None  # None: no MASTER_ADDR
    full_name: str = ""  # with its domain: where torchrun's rank 0 lets the workers of c10d meet
    opens_store: bool | None = None  # in c10d mode; None: torchrun ends with an error, or no name
    hosts_lines: tuple[HostsLine, ...] = ()  # those that name this node, the master or a peer
    reverse_ms: float = -1.0  # the slowest getnameinfo of the own and peers' addresses; -1: none
    reverse_of: str = ""  # that address


def collect(system: System, master_addr: str, peers: Sequence[str]) -> NameFacts:
    """Resolve the own name, the master's and some peers' at once; look all up in /etc/hosts."""
    hostname = system.hostname()
    wanted = {name: None for name in (hostname, master_addr, *peers[:MAX_ASKED]) if name}
    found: dict[str, Resolved] = {}

    def ask(name: str) -> None:
        found[name] = system.resolve(name)

    full: list[str] = []
    threads = [threading.Thread(target=ask, args=(name,)) for name in wanted]
    _at_once([*threads, threading.Thread(target=lambda: full.append(system.full_name()))])
    own = found[hostname] if hostname else Resolved(name="", error="this host has no name")
    master = found.get(master_addr)
    addresses = [address for answer in found.values() for address in answer.addresses]
    is_slow = any(answer.elapsed_ms > _FIRST_LIMIT_MS for answer in found.values())
    reverse_ms, reverse_of = _slowest_reverse(system, () if is_slow else addresses)
    return NameFacts(
        hostname=hostname,
        own=own,
        master=master,
        full_name=full[0] if full else "",
        opens_store=opens_store(master_addr, hostname, own, master) if master_addr else None,
        hosts_lines=_hosts_lines(system, {hostname, master_addr, *peers}),
        reverse_ms=reverse_ms,
        reverse_of=reverse_of,
    )


def _slowest_reverse(system: System, addresses: Sequence[str]) -> tuple[float, str]:
    """Time the names of addresses, as c10d asks for them at every accepted connection."""
    asked = [a for a in dict.fromkeys(addresses) if _is_outside(a)][: 2 * MAX_ASKED]
    took: dict[str, float] = {}

    def ask(address: str) -> None:
        took[address] = system.reverse(address, REVERSE_LIMIT_S)

    _at_once([threading.Thread(target=ask, args=(address,)) for address in asked])
    slowest = max(took, key=lambda address: took[address], default="")
    return (took[slowest], slowest) if slowest else (-1.0, "")


def _at_once(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # what they call has a limit of its own


def _is_outside(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False  # a name
    return not (address.is_loopback or address.is_link_local)


def _hosts_lines(system: System, names: set[str]) -> tuple[HostsLine, ...]:
    lowered = {name.lower() for name in names if name}
    lines = []
    for number, text in enumerate((system.read("/etc/hosts") or "").splitlines(), start=1):
        words = text.partition("#")[0].split()
        if lowered & {word.lower() for word in words[1:]}:
            lines.append(HostsLine(number=number, text=" ".join(words)))
    return tuple(lines)
