"""The disk of an embedded store: what is free, when nothing more is taken, and the reserve file.

A full disk cannot even be freed: to delete rows, SQLite writes first. So a file of a set size
takes its place beforehand and is given up when something is to be deleted. Nothing else may write
until there is room for it again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from rankscope_server.store.engine import StoreUnavailableError

log = logging.getLogger(__name__)
RESERVE_NAME = "rankscope.reserve"
_OPENING_BYTES = 1 << 20  # lock, shared memory and log of SQLite
_FRESH_SECONDS = 0.25  # a fast run writes a few MiB in it
_AFTER_FAILURE_BYTES = 1 << 20  # so much must be free before the next try
REMEDY = "free space there, delete runs, or set --keep-runs-bytes; senders retry by themselves"


def database_bytes(connection: sa.Connection) -> int:
    """Return the size of the database with its indexes, without SQLite's log."""
    if connection.dialect.name == "postgresql":
        size = sa.func.pg_database_size(sa.func.current_database())
        return int(connection.scalar(sa.select(size)) or 0)
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())


@dataclass(frozen=True, slots=True)
class Space:
    """What there is now, in bytes; of a database server elsewhere nothing is known."""

    free_bytes: int | None = None
    total_bytes: int | None = None
    reserve_bytes: int = 0  # what the reserve file holds
    database_bytes: int | None = None
    wal_bytes: int = 0


class Disk:
    """Decides whether a write may begin. `admit`, `failed` and `release` from any thread."""

    def __init__(self, database: Path | None, reserve_bytes: int, low_bytes: int) -> None:
        self._database = database
        self._reserve = database.with_name(RESERVE_NAME) if database is not None else None
        self._reserve_bytes, self._low_bytes = reserve_bytes, low_bytes
        self._lock = threading.Lock()
        self._reason = ""  # why nothing is taken; empty while it is
        self._looked = -_FRESH_SECONDS  # when that was read
        self._has_failed = self._is_released = False
        self.on_full: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Give the reserve up where the disk is too full even to open the database."""
        if self._reserve is not None and self._held() and self.is_used_up():
            log.warning("the disk is full: its reserve is given up to start")
            self._reserve.unlink(missing_ok=True)

    def is_used_up(self) -> bool:
        """Return whether there is not even the room to open the database."""
        return self._database is not None and self._free() < _OPENING_BYTES

    def admit(self) -> None:
        """Return where a write may begin. Raises StoreUnavailableError while the disk is full.

        Where there was room a moment ago there is: to ask the system costs as much as a request.
        """
        if not self._reason and time.monotonic() - self._looked < _FRESH_SECONDS:
            return
        reason = self.full()
        if reason:
            raise StoreUnavailableError(reason, REMEDY, cause="disk_full")

    def full(self) -> str:
        """Return why nothing is taken now, empty where writes may begin; looks anew each time."""
        if self._database is None:
            return ""
        with self._lock:
            before, self._reason = self._reason, self._look()
            self._looked = time.monotonic()
            reason = self._reason
        if reason and not before:
            log.warning("no more data is taken in %s: %s; %s", self._database, reason, REMEDY)
            self.on_full()
        elif before and not reason:
            log.warning("data is taken again")
        return reason

    def failed(self) -> None:
        """Note that a write found the disk full, however much seemed to be free."""
        if self._database is not None:
            self._has_failed = True
            self.full()

    def release(self) -> None:
        """Give the reserve up, where the disk is full, until `restore`: something is deleted."""
        if self._reserve is None or not self.full():
            return
        with self._lock:
            self._is_released = True
            if self._held():
                log.warning("the reserve of %d bytes is given up to delete", self._reserve_bytes)
                self._reserve.unlink(missing_ok=True)

    def restore(self) -> None:
        """Make the reserve again, as soon as there is room: what was to be deleted is."""
        self._is_released = False
        self.full()

    def space(self) -> Space:
        """Return what there is."""
        if self._database is None or self._reserve is None:
            return Space()
        usage = shutil.disk_usage(self._database.parent)
        return Space(
            usage.free, usage.total, _size(self._reserve), _size(self._database),
            _size(self._database.with_name(self._database.name + "-wal")),
        )  # fmt: skip

    def _look(self) -> str:
        """Return why nothing is taken; where there is room make the reserve first."""
        free, wanted = self._free(), self._reserve_bytes - self._held()
        margin = max(self._low_bytes, _AFTER_FAILURE_BYTES if self._has_failed else 0)
        is_room = free >= margin + max(wanted, 0) and not self._is_released
        if is_room and (wanted <= 0 or self._make_reserve()):
            self._has_failed = False
            return ""
        needed = (margin + max(wanted, 0)) >> 20
        # Readiness is open to all: no path is in this.
        says = f"{free >> 20} MiB are free, it needs {needed or 1} MiB"
        return f"the disk of the server is full: {says}"

    def _free(self) -> int:
        try:
            return shutil.disk_usage(self._database.parent).free if self._database else 0
        except OSError:  # no folder yet: that is for those who make it to report
            return 1 << 62

    def _held(self) -> int:
        return _size(self._reserve) if self._reserve is not None else 0

    def _make_reserve(self) -> bool:
        """Make the file, its blocks taken; return whether it is there."""
        if self._reserve is None:
            return True
        try:
            descriptor = os.open(self._reserve, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._reserve_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._reserve.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                return False
            log.warning("no reserve can be made (%s): a full disk must be freed by hand", error)
            self._reserve_bytes = 0  # it would be tried, and reported, with each batch
        return True


def disk_of(url: str, reserve_bytes: int, low_bytes: int) -> Disk:
    """Return the disk under a database; of a database server elsewhere it knows nothing."""
    address = sa.make_url(url)
    is_file = address.get_backend_name() == "sqlite" and address.database
    return Disk(Path(str(address.database)) if is_file else None, reserve_bytes, low_bytes)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
