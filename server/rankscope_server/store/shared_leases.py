"""Leases in PostgreSQL: a row for each process that is up, a row for each kind of work.

A thread says once a second that this process is up, and takes what it asked for where the owner
has not said so for `TERM_SECONDS` by the clock of the database. That is one row written a second,
however many leases a process holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from rankscope_server.store import tables
from rankscope_server.store.engine import open_for_leases, upsert
from rankscope_server.store.leases import (
    OF_THE_STORE,
    Held,
    Leases,
    OneProcess,
    Vitals,
    VitalsOf,
    new_owner,
)

log = logging.getLogger(__name__)
# With a second until the next look, and what it takes to read a run again, below 10 s.
TERM_SECONDS = 4.0
RENEW_SECONDS = 1.0
_FORGET_SECONDS = 86_400.0  # after which a process that is gone leaves its table
_NOW_NS = sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000_000, sa.BigInteger)
_SERVER, _LEASE = tables.server.c, tables.lease.c
_NAMED = _LEASE.name == sa.any_(sa.bindparam("names", type_=postgresql.ARRAY(sa.Text)))
_SAID = ("expires_ns", "behind_ms", "queue_ratio", "says")  # anew with every renewal
_OWNER: sa.BindParameter[str] = sa.bindparam("mine")
_UP = sa.select(_SERVER.id).where(_SERVER.expires_ns > _NOW_NS)
_SELECT_HELD = sa.select(_LEASE.name, _LEASE.epoch).where(_NAMED, _LEASE.owner == _OWNER)
_SELECT_KNOWN = sa.select(_LEASE.name).where(_NAMED)
# What a transaction of its owner is about to write (`Held.check`) is not taken meanwhile.
_SELECT_FREE = (
    sa.select(_LEASE.name).where(_NAMED, _LEASE.owner.not_in(_UP)).with_for_update(skip_locked=True)
)
_TAKE = (
    sa.update(tables.lease)
    .where(_NAMED)
    .values(owner=_OWNER, epoch=_LEASE.epoch + 1)
    .returning(_LEASE.name, _LEASE.epoch)
)
_GIVE_BACK = sa.update(tables.lease).where(_NAMED, _LEASE.owner == _OWNER).values(owner="")
_END = sa.update(tables.lease).where(_LEASE.owner == _OWNER).values(owner="")
_FORGET = sa.delete(tables.server).where(
    _SERVER.expires_ns < sa.bindparam("before_ns"),
    _SERVER.id.not_in(sa.select(_LEASE.owner)),
)
_WORKING_ROLES = ("worker", "all")
_SELECT_OTHERS = sa.select(
    sa.func.count(),
    sa.func.max(_SERVER.behind_ms),
    sa.func.max(_SERVER.queue_ratio),
    sa.func.array_agg(_SERVER.id).filter(_SERVER.role.in_(_WORKING_ROLES)),
).where(_SERVER.id != _OWNER, _SERVER.expires_ns > _NOW_NS)
# since when work waits whose owner is not up any more
_SELECT_ORPHANED = (
    sa.select(sa.func.max(_NOW_NS - _SERVER.expires_ns))
    .select_from(tables.lease)
    .join(tables.server, _SERVER.id == _LEASE.owner)
    .where(_NAMED, _SERVER.expires_ns <= _NOW_NS)
)


@contextmanager
def open_leases(
    url: str, writing: sa.Engine, role: str = "all", names: Iterable[str] = OF_THE_STORE
) -> Iterator[Leases]:
    """Give the leases of this process on a store; at the end they are given back.

    It asks for `names` from the start. With SQLite it has the lock of the file (`only_server`).
    """
    if writing.dialect.name != "postgresql":
        yield OneProcess(writing)
        return
    engine = open_for_leases(url)
    leases = SharedLeases(engine, role=role)
    for name in names:
        leases.hold(name)
    leases.start()
    try:
        yield leases
    finally:
        leases.close()
        engine.dispose()


@dataclass(frozen=True, slots=True)
class _Renewed:
    """What the last renewal found."""

    at: float = float("-inf")  # when it began, on the monotonic clock
    others: Vitals = field(default_factory=Vitals)
    num_others: int = 0
    workers: tuple[str, ...] = ()


class SharedLeases:
    """The leases of one process. `start` and `close` once."""

    is_shared = True

    def __init__(self, engine: sa.Engine, vitals: VitalsOf = Vitals, *, role: str = "all") -> None:
        self.owner, self._name = new_owner()
        self._role = role
        self.vitals = vitals
        self._engine = engine
        self._lock, self._renewing = threading.Lock(), threading.Lock()
        self._has_wishes = False
        self._wanted: dict[str, str] = {}  # run by name
        self._given_back: set[str] = set()
        self._held: dict[str, Held] = {}
        self._renewed = _Renewed()
        self._failure = ""
        self._awake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-leases", daemon=True)

    def start(self) -> None:
        """Say that this process is up, take what was asked for, and go on with both."""
        self.take()
        self._thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Give all leases back, so that another process goes on at once."""
        self._stop.set()
        self._awake.set()
        self._thread.join(timeout_seconds)

    def hold(self, name: str, run_id: str = "") -> Held | None:
        """Return the lease while this process has it, and ask for it where it has not."""
        with self._lock:
            if name not in self._wanted:
                self._wanted[name] = run_id
                self._given_back.discard(name)
                self._has_wishes = True
                self._awake.set()
            # Of what a process that was stopped believes, nothing is sure before it has renewed.
            is_sure = time.monotonic() - self._renewed.at < TERM_SECONDS
            return self._held.get(name) if is_sure else None

    def take(self) -> None:
        """Take what was asked for since the last renewal, now and not within a second."""
        with self._renewing:
            if self._has_wishes:
                self._try()

    def release(self, name: str) -> None:
        """Give a lease back, and ask for it no more."""
        with self._lock:
            self._wanted.pop(name, None)
            if self._held.pop(name, None) is not None:
                self._given_back.add(name)

    @property
    def others(self) -> Vitals:
        """Return the worst of the other processes, and of work that has no owner."""
        return self._renewed.others

    @property
    def num_servers(self) -> int:
        """Return how many processes are up, this one with them."""
        return 1 + self._renewed.num_others

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the processes that are up and store what is in the log, in an order."""
        return self._renewed.workers

    def renew(self) -> None:
        """Say that this process is up, give back and take leases; one thread at a time.

        Raises SQLAlchemyError.
        """
        with self._lock:
            self._has_wishes = False
            wanted, given_back = dict(self._wanted), set(self._given_back)
        at = time.monotonic()
        with self._engine.begin() as connection:
            self._say_up(connection)
            if given_back:
                connection.execute(_GIVE_BACK, self._of(given_back))
            found = self._take(connection, wanted)
            others, num_others, workers = self._look_at_others(connection, wanted)
        with self._lock:
            self._given_back -= given_back
            self._held = {
                name: Held(name, self.owner, epoch)
                for name, epoch in found.items()
                if name in self._wanted
            }
            self._renewed = _Renewed(at, others, num_others, workers)

    def _of(self, names: Iterable[str]) -> dict[str, Any]:
        return {"names": sorted(names), "mine": self.owner}

    def _say_up(self, connection: sa.Connection) -> None:
        vitals = self.vitals()
        now_ns = int(connection.execute(sa.select(_NOW_NS)).scalar_one())
        row = {
            "id": self.owner, "name": self._name, "expires_ns": now_ns + int(TERM_SECONDS * 1e9),
            "behind_ms": int(vitals.behind_seconds * 1e3), "queue_ratio": vitals.queue_ratio,
            "says": msgspec.json.encode(vitals.says).decode(), "role": self._role,
        }  # fmt: skip
        upsert(connection, tables.server, [row], _SAID)
        long_ago_ns = now_ns - int(_FORGET_SECONDS * 1e9)
        connection.execute(_FORGET, {"before_ns": long_ago_ns})

    def _take(self, connection: sa.Connection, wanted: dict[str, str]) -> dict[str, int]:
        """Return the epochs of what this process holds now, by name."""
        if not wanted:
            return {}
        known = set(connection.scalars(_SELECT_KNOWN, {"names": list(wanted)}))
        rows = [{"name": name, "run_id": wanted[name]} for name in sorted(wanted.keys() - known)]
        upsert(connection, tables.lease, rows)
        held = {row.name: row.epoch for row in connection.execute(_SELECT_HELD, self._of(wanted))}
        free = connection.scalars(_SELECT_FREE, {"names": sorted(wanted.keys() - held)}).all()
        if free:
            held |= {row.name: row.epoch for row in connection.execute(_TAKE, self._of(free))}
        return held

    def _look_at_others(
        self, connection: sa.Connection, wanted: Iterable[str]
    ) -> tuple[Vitals, int, tuple[str, ...]]:
        number, behind_ms, queue_ratio, workers = connection.execute(
            _SELECT_OTHERS, {"mine": self.owner}
        ).one()
        orphaned_ns = connection.scalar(_SELECT_ORPHANED, {"names": list(wanted)})
        orphaned_s = 0.0 if orphaned_ns is None else int(orphaned_ns) / 1e9 + TERM_SECONDS
        behind_s = max(int(behind_ms or 0) / 1e3, orphaned_s)
        ours = [self.owner] if self._role in _WORKING_ROLES else []
        all_workers = tuple(sorted([*(workers or []), *ours]))
        return Vitals(behind_s, float(queue_ratio or 0.0)), int(number), all_workers

    def _try(self) -> None:
        try:
            self.renew()
            self._failure = ""
        except sa.exc.SQLAlchemyError as error:
            if type(error).__name__ != self._failure:  # once, not every second
                self._failure = type(error).__name__
                log.warning("leases are not renewed now: %s", error)

    def _work(self) -> None:
        while not self._stop.is_set():
            self._awake.wait(RENEW_SECONDS)
            self._awake.clear()
            with self._renewing:
                self._try()
        try:
            with self._engine.begin() as connection:
                connection.execute(_END, {"mine": self.owner})
                connection.execute(sa.delete(tables.server).where(_SERVER.id == self.owner))
        except sa.exc.SQLAlchemyError as error:
            log.info("leases were not given back, and end by themselves: %s", error)
