"""The bounded queue of batches: one file each, so that they outlive the collector.

A file appears by rename. It is deleted when the server has acknowledged it, or when it is the
oldest and the limit is reached. While the disk takes no file, batches wait in memory, fewer of
them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankscope.files.run_directory import make_private
from rankscope.node.offsets import Offsets

MAGIC = b"RSCSPL01"
SUFFIX = ".batch"
MAX_MEMORY_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 64 << 20


class SpoolHeader(msgspec.Struct):
    """What comes before the batch in its file; `offsets` are those that the batch reached."""

    producer: str
    sequence: int
    num_items: int  # records and events
    offsets: Offsets


@dataclass(frozen=True)
class SpoolEntry:
    """One batch that waits: in a file, or in memory."""

    sequence: int
    num_items: int
    num_bytes: int
    path: Path | None
    data: bytes = b""

    def body(self) -> bytes:
        """Return the batch as it is posted. Raises OSError, ValueError for a damaged file."""
        if self.path is None:
            return self.data
        with self.path.open("rb") as file:
            _read_header(file.read(len(MAGIC) + _LENGTH.size), file.read)
            return file.read()


class Spool:
    """Written by the main thread, emptied by the uploading one. `recovered` are the newest offsets.

    Raises OSError if the directory cannot be made.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.recovered: Offsets | None = None
        self.num_damaged = 0
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._entries: deque[SpoolEntry] = deque()
        self._bytes = {False: 0, True: 0}  # of the entries: in files, in memory
        self._in_flight: SpoolEntry | None = None
        self._changed = threading.Condition()
        make_private(directory)
        self._recover()

    # --- the writing side ----------------------------------------------------------------

    def write(self, header: SpoolHeader, body: bytes) -> SpoolEntry:
        """Make the file of a batch; it is not yet offered to the upload. Raises OSError."""
        path = self._directory / f"{header.sequence:016d}{SUFFIX}"
        fresh = path.with_suffix(".tmp")
        head = msgspec.msgpack.encode(header)
        try:
            with fresh.open("wb") as file:
                file.write(MAGIC + _LENGTH.pack(len(head)) + head)
                file.write(body)
            os.replace(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        return SpoolEntry(header.sequence, header.num_items, path.stat().st_size, path)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a file of this size fits as things are."""
        return self._bytes[False] + num_bytes <= self._limit_bytes

    def make_room(self, num_bytes: int) -> list[SpoolEntry]:
        """Take the oldest files out of the queue until one of this size fits, or none is left.

        They are to be passed to `delete` when their loss is on the disk.
        """
        with self._changed:
            return self._take_out(in_memory=False, limit=self._limit_bytes - num_bytes)

    @staticmethod
    def delete(entries: list[SpoolEntry]) -> None:
        """Delete the files of batches that are out of the queue."""
        for entry in entries:
            _delete(entry)

    def offer(self, entry: SpoolEntry) -> list[SpoolEntry]:
        """Queue a batch; return those in memory that had to go for it."""
        with self._changed:
            limit = MAX_MEMORY_BYTES - (entry.num_bytes if entry.path is None else 0)
            gone = self._take_out(in_memory=True, limit=limit)
            self._append(entry)
            self._changed.notify_all()
        return gone

    def _take_out(self, *, in_memory: bool, limit: int) -> list[SpoolEntry]:
        gone: list[SpoolEntry] = []
        if self._bytes[in_memory] <= limit:
            return gone
        for entry in [one for one in self._entries if (one.path is None) is in_memory]:
            if self._bytes[in_memory] <= limit:
                break
            if entry is not self._in_flight:
                self._remove(entry)
                gone.append(entry)
        return gone

    # --- the uploading side --------------------------------------------------------------

    def take(self, timeout_seconds: float) -> SpoolEntry | None:
        """Return the oldest batch, which stays until `done`; None if none came in time."""
        with self._changed:
            if not self._entries:
                self._changed.wait(timeout_seconds)
            self._in_flight = self._entries[0] if self._entries else None
            return self._in_flight

    def done(self, entry: SpoolEntry) -> None:
        """Remove a batch that is acknowledged, or refused for good."""
        with self._changed:
            self._in_flight = None
            with contextlib.suppress(ValueError):
                self._remove(entry)
        _delete(entry)

    # --- both ----------------------------------------------------------------------------

    def waiting(self) -> tuple[int, int]:
        """Return (batches, bytes) that wait."""
        with self._changed:
            return len(self._entries), sum(self._bytes.values())

    def has_memory_entries(self) -> bool:
        """Return whether some batch is nowhere but in memory."""
        with self._changed:
            return self._bytes[True] > 0

    def _append(self, entry: SpoolEntry) -> None:
        self._entries.append(entry)
        self._bytes[entry.path is None] += entry.num_bytes

    def _remove(self, entry: SpoolEntry) -> None:
        self._entries.remove(entry)  # near the left end: the oldest go first
        self._bytes[entry.path is None] -= entry.num_bytes

    def _recover(self) -> None:
        for path in self._directory.glob("*.tmp"):
            path.unlink(missing_ok=True)
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                with path.open("rb") as file:
                    header = _read_header(file.read(len(MAGIC) + _LENGTH.size), file.read)
                size = path.stat().st_size
            except (ValueError, RecursionError):
                self.num_damaged += 1
                path.unlink(missing_ok=True)
                continue
            except OSError:  # the disk does not answer now: the upload waits for the file
                sequence = path.name.removesuffix(SUFFIX)
                if sequence.isdecimal():
                    self._append(SpoolEntry(int(sequence), 1, 0, path))
                continue
            self._append(SpoolEntry(header.sequence, header.num_items, size, path))
            if self.recovered is None or header.offsets.sequence > self.recovered.sequence:
                self.recovered = header.offsets
        dropped = set(self.recovered.dropped if self.recovered else ())
        for entry in [one for one in self._entries if one.sequence in dropped]:
            self._remove(entry)
            _delete(entry)


def _read_header(start: bytes, read: Callable[[int], bytes]) -> SpoolHeader:
    if start[: len(MAGIC)] != MAGIC or len(start) != len(MAGIC) + _LENGTH.size:
        raise ValueError("not a spool file")
    (length,) = _LENGTH.unpack_from(start, len(MAGIC))
    if length > _MAX_HEADER_BYTES:
        raise ValueError("header too long")
    return msgspec.msgpack.decode(read(length), type=SpoolHeader)


def _delete(entry: SpoolEntry) -> None:
    if entry.path is not None:
        with contextlib.suppress(OSError):
            entry.path.unlink()
