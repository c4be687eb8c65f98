"""Names: what this node resolves itself and the master to."""

from __future__ import annotations

import msgspec


class Resolved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one name, in the order of the resolver."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""  # "EAI_NONAME: Name or service not known", "no answer in 3 s"
    elapsed_ms: float = 0.0


class HostsLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of /etc/hosts that names one of the nodes."""

    number: int
    text: str


class NameFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What names mean on this node."""

    hostname: str
    own: Resolved
    master: Resolved | None = None  # None: no MASTER_ADDR
    hosts_lines: tuple[HostsLine, ...] = ()  # those that name this node, the master or a peer
    reverse_ms: float = -1.0  # getnameinfo of the own address; -1: not asked
