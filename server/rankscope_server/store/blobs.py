"""Where the data of chunks is: in their rows, or in objects that their rows name.

What reads and writes chunks asks `blobs_of` its connection and does not know which it is. Data that
is in a row stays there when objects are chosen later, and is read as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import sqlalchemy as sa

from rankscope_server.store.engine import StoreUnavailableError

CAUSE = "blobs"  # of what is unavailable
_OPTION = "blobs"  # of an engine


class Place(NamedTuple):
    """What a row of `chunk` says of its data: all of it, or which bytes of which object."""

    data: bytes
    object: str | None = None
    start: int = 0
    num_bytes: int = 0  # in the object; 0 where the row has them
    crc32: int = 0  # of what is in the object


class Blobs(Protocol):
    """Keeps data. All of it from any thread; all but `unready` raise StoreUnavailableError."""

    def admit(self) -> None:
        """Return where `put` may be tried: it is asked before other work is done for it."""

    def put(self, parts: Sequence[tuple[str, bytes]]) -> list[Place]:
        """Keep data, each part in a folder (words of letters, digits and -_., with slashes).

        Once this returns, it is as durable as a row that is committed.
        """

    def get(self, places: Sequence[Place]) -> list[bytes | None]:
        """Return what was put, None where it is missing or not what was put."""

    def delete(self, objects: Collection[str]) -> None:
        """Delete objects; one that is not there is no error."""

    def objects_before(self, time_ns: int) -> Iterator[list[str]]:
        """Yield the objects that are older than a time, some at a time."""

    def unready(self) -> str:
        """Return why data cannot be kept now, empty where it can; it is tried."""

    def close(self) -> None:
        """Ask nothing any more."""


class ColumnBlobs:
    """Keeps data in the rows themselves."""

    def __init__(self, reason: str = "") -> None:
        """`reason` says why not all of it can be read: rows name objects."""
        self._reason = reason

    def admit(self) -> None:
        """Return: the database itself says what it takes."""

    def put(self, parts: Sequence[tuple[str, bytes]]) -> list[Place]:
        """Return places that hold the data."""
        return [Place(data) for _, data in parts]

    def get(self, places: Sequence[Place]) -> list[bytes | None]:
        """Return the data of the places. Raises StoreUnavailableError for an object."""
        if any(place.object is not None for place in places):
            raise StoreUnavailableError(
                "this data is in objects, and no store of objects is set", "set --blobs", CAUSE
            )
        return [place.data for place in places]

    def delete(self, objects: Collection[str]) -> None:
        """Delete nothing. Raises StoreUnavailableError where there is something."""
        if objects:
            raise StoreUnavailableError("no store of objects is set", "set --blobs", CAUSE)

    def objects_before(self, time_ns: int) -> Iterator[list[str]]:
        """Yield nothing."""
        return iter(())

    def unready(self) -> str:
        """Return why not all of it can be read."""
        return self._reason

    def close(self) -> None:
        """Do nothing."""


IN_ROWS = ColumnBlobs()


def keep_in(blobs: Blobs, *engines: sa.Engine) -> None:
    """Let connections of these engines keep the data of chunks there."""
    for engine in engines:
        engine.update_execution_options(**{_OPTION: blobs})


def blobs_of(connection: sa.Connection) -> Blobs:
    """Return where the data of chunks is that a connection reads and writes; by default in rows."""
    found: Blobs = connection.get_execution_options().get(_OPTION, IN_ROWS)
    return found
