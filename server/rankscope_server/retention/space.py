"""Gives the room of removed rows back to the disk, and keeps the write-ahead log small."""

from __future__ import annotations

import logging
from collections.abc import Callable

import sqlalchemy as sa

from rankscope_server.store.disk import Disk, database_bytes
from rankscope_server.store.engine import WAL_LIMIT_BYTES
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
PAGES_PER_TURN = 128
_FULL_WAL_BYTES = 512 << 10  # on a full disk the log lives on the reserve
_INCREMENTAL = 2


class Space:
    """Of one store."""

    def __init__(self, writer: Writer, reader: sa.Engine, disk: Disk) -> None:
        self._writer, self._reader, self._disk = writer, reader, disk

    def free_bytes(self) -> int | None:
        """Return how much of the database file is free; None where it is no file."""
        if self._reader.dialect.name != "sqlite":
            return None
        with self._reader.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
        return int(pages) * int(size)

    def database_bytes(self) -> int | None:
        """Return the size of the database with its indexes; None where it is not known."""
        if self._reader.dialect.name != "postgresql":
            return self._disk.space().database_bytes
        with self._reader.connect() as connection:
            return database_bytes(connection)

    def wal_has_room(self) -> bool:
        """Return whether the write-ahead log may grow; shrink it where it is too large.

        A reader that is slow holds it back: then the work waits, not the disk.
        """
        limit = _FULL_WAL_BYTES if self._disk.full() else WAL_LIMIT_BYTES
        if self._disk.space().wal_bytes <= limit:
            return True
        self.checkpoint()
        return self._disk.space().wal_bytes <= limit

    def checkpoint(self) -> None:
        """Write the log into the database and cut it, unless a reader is in the way."""
        if self._reader.dialect.name != "sqlite":
            return
        raw = self._reader.raw_connection()
        try:
            cursor = raw.cursor()
            cursor.execute("PRAGMA busy_timeout=200")  # writers wait behind it
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            cursor.execute("PRAGMA busy_timeout=10000")
        finally:
            raw.close()

    def give_back(self, tables: set[str], goes_on: Callable[[], bool]) -> None:
        """Return free pages to the disk, some at a time, as long as `goes_on`."""
        if self._reader.dialect.name == "postgresql":
            self._vacuum_postgresql(tables)
            return
        while goes_on() and self._writer.run(_shorten, frees_space=True):
            if not self.wal_has_room():
                return
        self.checkpoint()

    def _vacuum_postgresql(self, tables: set[str]) -> None:
        """Make the room of dead rows free for new ones, and cut the end of a table off."""
        with self._reader.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            for name in sorted(tables):
                connection.exec_driver_sql(f'VACUUM "{name}"')


def _shorten(unit: Unit) -> bool:
    """Cut some free pages off the file; return whether more are left to cut."""
    connection = unit.connection
    if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != _INCREMENTAL:
        return False  # made by an earlier version: free pages are used again, not given back
    pages = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
    for _ in range(min(pages, PAGES_PER_TURN)):  # the driver does one page each time
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return pages > PAGES_PER_TURN
