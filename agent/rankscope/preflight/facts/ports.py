"""Ports of this node: what is taken, by whom, and which range is handed out."""

from __future__ import annotations

import msgspec


class PortOwner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who holds a port. pid 0: a process that this user may not see."""

    port: int
    pid: int = 0
    command: str = ""
    user: str = ""
    age_s: float = 0.0


class Leftover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training process older than this preflight that holds a port or a GPU."""

    pid: int
    command: str
    user: str = ""
    age_s: float = 0.0
    ports: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class PortFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ports as the kernel of this node sees them."""

    range_low: int = 0  # ip_local_port_range
    range_high: int = 0
    master_busy: PortOwner | None = None  # None: MASTER_PORT could be bound here
    num_time_wait: int = -1
    conntrack_count: int = -1
    conntrack_max: int = -1
    leftovers: tuple[Leftover, ...] = ()
