"""Who does which work in the background, where several server processes share a store.

Work has a name, and is done by the process that holds the lease of that name. A lease has an epoch
that grows with every owner. A process that writes what is its work alone calls `Held.check` within
the transaction: one that was stopped, lost its lease and is woken finds another owner there, and
writes nothing. Clocks of hosts decide nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.engine import upsert

_LEASE = tables.lease.c
_SELECT_MINE = sa.select(_LEASE.epoch).where(
    _LEASE.name == sa.bindparam("name"),
    _LEASE.owner == sa.bindparam("owner"),
    _LEASE.epoch == sa.bindparam("epoch"),
)
# The next owner waits for the end of this transaction; a renewal does not.
_SELECT_TO_WRITE = _SELECT_MINE.with_for_update(read=True, key_share=True)

_ADVANCE = (
    sa.update(tables.lease)
    .where(
        _LEASE.name == sa.bindparam("of"),
        _LEASE.owner == sa.bindparam("mine"),
        _LEASE.epoch == sa.bindparam("held"),
    )
    .values(applied=sa.bindparam("to"))
)

# Work of the whole store; that of a run has a lease of its own.
ALERTS, RETENTION, PREFLIGHTS = "alerts", "retention", "preflights"
OF_THE_STORE = (ALERTS, RETENTION, PREFLIGHTS)


class LeaseLostError(RuntimeError):
    """Another process does this work now: what was to be written is not."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease of this process."""

    name: str
    owner: str
    epoch: int

    def check(self, connection: sa.Connection) -> None:
        """Raise LeaseLostError, unless this lease holds until the end of the transaction."""
        if not self.is_held(connection, _SELECT_TO_WRITE):
            raise LeaseLostError(f"the lease of {self.name} has another owner now")

    def advance(self, connection: sa.Connection, applied: int) -> None:
        """Write that a partition of the log is in the store up to `applied`, with this transaction.

        Raises LeaseLostError where another process has it now.
        """
        mine = {"of": self.name, "mine": self.owner, "held": self.epoch, "to": applied}
        if not connection.execute(_ADVANCE, mine).rowcount:
            raise LeaseLostError(f"the lease of {self.name} has another owner now")

    def is_held(
        self, connection: sa.Connection, question: sa.Select[tuple[int]] = _SELECT_MINE
    ) -> bool:
        """Return whether this process has it now; who writes asks `check`."""
        mine = {"name": self.name, "owner": self.owner, "epoch": self.epoch}
        return connection.scalar(question, mine) is not None


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a server process is."""

    behind_seconds: float = 0.0  # for how long what is stored waits for its analysis
    queue_ratio: float = 0.0  # how full the queue of its writer is, 0-1
    says: Mapping[str, Any] = field(default_factory=dict)  # how its work goes, by name; for JSON


class Leases(Protocol):
    """The leases of one process; from any thread."""

    is_shared: bool  # whether there may be other processes

    def hold(self, name: str, run_id: str = "") -> Held | None:
        """Return the lease while this process has it, and ask for it where it has not.

        Never waits: who gets None asks again later. `run_id` is the run that it is about.
        """

    def take(self) -> None:
        """Take what was asked for since the last time, now and not within a second."""

    def release(self, name: str) -> None:
        """Give a lease back, and ask for it no more."""

    @property
    def others(self) -> Vitals:
        """Return the worst of the other processes, and of work that has no owner."""

    @property
    def num_servers(self) -> int:
        """Return how many processes are up, this one with them."""


class LeasesOf:
    """The leases of a process that may have some names only; the others are other processes'."""

    is_shared = True

    def __init__(self, leases: Leases, names: Collection[str]) -> None:
        self._leases, self._names = leases, names

    def hold(self, name: str, run_id: str = "") -> Held | None:
        """Return the lease while this process has it, and ask for it where it may have it."""
        return self._leases.hold(name, run_id) if name in self._names else None

    def take(self) -> None:
        """Take what was asked for since the last time."""
        self._leases.take()

    def release(self, name: str) -> None:
        """Give a lease back, and ask for it no more."""
        self._leases.release(name)

    @property
    def others(self) -> Vitals:
        """Return the worst of the other processes."""
        return self._leases.others

    @property
    def num_servers(self) -> int:
        """Return how many processes are up."""
        return self._leases.num_servers


def new_owner() -> tuple[str, str]:
    """Return the id of this life of the process, and its name for people."""
    return secrets.token_hex(8), f"{socket.gethostname()} process {os.getpid()}"


class OneProcess:
    """Leases where the store admits one process: with its lock (`only_server`) it has all."""

    is_shared = False
    others = Vitals()
    num_servers = 1

    def __init__(self, engine: sa.Engine) -> None:
        owner, _ = new_owner()
        with engine.begin() as connection:
            row = {"name": "process", "owner": owner}
            before = connection.scalar(sa.select(_LEASE.epoch).where(_LEASE.name == row["name"]))
            epoch = (before or 0) + 1
            upsert(connection, tables.lease, [{**row, "epoch": epoch}], ("owner", "epoch"))
        self._held = Held(row["name"], owner, epoch)

    def hold(self, name: str, run_id: str = "") -> Held:
        """Return the lease of the process."""
        return self._held

    def take(self) -> None:
        """Do nothing: all is held."""

    def release(self, name: str) -> None:
        """Do nothing: no process waits for it."""


VitalsOf = Callable[[], Vitals]


def said_of(connection: sa.Connection, name: str) -> Any:
    """Return what the owner of a lease says of its work; None where nothing is known."""
    server = tables.server.c
    said = connection.scalar(
        sa.select(server.says)
        .select_from(tables.lease)
        .join(tables.server, server.id == _LEASE.owner)
        .where(_LEASE.name == name)
    )
    return None if said is None else msgspec.json.decode(said).get(name)


def applied_of(connection: sa.Connection, name: str) -> int:
    """Return up to where a partition of the log is in the store; 0 for nothing."""
    return int(connection.scalar(sa.select(_LEASE.applied).where(_LEASE.name == name)) or 0)
