"""The bounded queue of batches: one file each, so that they outlive the collector.

A file appears by rename. It is deleted when the server has stored it, or when it is the oldest and
the limit is reached. A server may accept a batch before it has stored it: then it is held, to be
sent again if it is lost there. While the disk takes no file, batches wait in memory, fewer of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankscope.files.run_directory import make_private
from rankscope.node.offsets import Offsets
from rankscope.wire.schema import Watermark

MAGIC = b"RSCSPL01"
SUFFIX = ".batch"
MAX_MEMORY_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 64 << 20
# How long nothing of what was accepted may become durable before the oldest is sent again, and the
# longest of these pauses, each of which is twice the one before.
_FIRST_STILL_SECONDS, _LAST_STILL_SECONDS = 30.0, 480.0

logger = logging.getLogger(__name__)


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
    producer: str = ""  # empty: not known, as its file cannot be read now

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

    def __init__(
        self, directory: Path, limit_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.recovered: Offsets | None = None
        self.num_damaged = 0
        self._directory = directory
        self._limit_bytes, self._clock = limit_bytes, clock
        self._entries: deque[SpoolEntry] = deque()  # to be sent
        self._held: deque[SpoolEntry] = deque()  # accepted, and not known to be stored
        self._bytes = {False: 0, True: 0}  # of both: in files, in memory
        self._in_flight: SpoolEntry | None = None
        self._again: SpoolEntry | None = None  # the held one that was sent again last
        self._still_since, self._still_seconds = 0.0, _FIRST_STILL_SECONDS
        self._has_said = False
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
        size = path.stat().st_size
        return SpoolEntry(header.sequence, header.num_items, size, path, producer=header.producer)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a file of this size fits as things are."""
        return self._bytes[False] + num_bytes <= self._limit_bytes

    def make_room(self, num_bytes: int) -> list[SpoolEntry]:
        """Take the oldest files out of the queue until one of this size fits, or none is left.

        They are to be passed to `delete` when their loss is on the disk. What the server has
        accepted goes first, and is no loss.
        """
        with self._changed:
            self._let_go(in_memory=False, limit=self._limit_bytes - num_bytes)
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
            self._let_go(in_memory=True, limit=limit)
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

    def _let_go(self, *, in_memory: bool, limit: int) -> None:
        """Hold the oldest of what is accepted no longer: no loss, unless the server loses it."""
        for entry in [one for one in self._held if (one.path is None) is in_memory]:
            if self._bytes[in_memory] <= limit:
                return
            self._release(entry)
            if not self._has_said:
                self._has_said = True
                logger.warning(
                    "the spool is full of batches that the server has accepted and not stored yet: "
                    "the oldest are not held any longer, and are lost if it loses them"
                )

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

    def hold(self, entry: SpoolEntry) -> None:
        """Take note that a batch is accepted: it is held until `settle` says that it is stored."""
        with self._changed:
            self._in_flight = None
            with contextlib.suppress(ValueError):  # there was no room for it
                self._entries.remove(entry)
                if not self._held:
                    self._stir()
                self._held.append(entry)

    def settle(self, producer: str, watermark: Watermark) -> None:
        """Release what is stored of a producer's batches; what was lost is to be sent again."""
        with self._changed:
            mine = [entry for entry in self._held if entry.producer == producer]
            stored = [entry for entry in mine if entry.sequence <= watermark.durable]
            # What is accepted is stored in that order: of two the one before cannot be on its way.
            lost = [one for one in mine if watermark.durable < one.sequence < watermark.newest]
            if self._again in stored:
                before = mine[: mine.index(self._again)]
                lost = [entry for entry in before if entry.sequence > watermark.durable]
            for entry in stored:
                self._release(entry)
            if stored:
                self._stir()
            self._send_again(lost)

    def send_again_if_still(self) -> None:
        """Send the oldest of what is held again, where for long nothing of it became durable."""
        with self._changed:
            due = self._still_since + self._still_seconds
            if self._held and self._clock() >= due:
                self._again = self._held[0]
                self._send_again([self._again])
                self._still_since += self._still_seconds
                self._still_seconds = min(2 * self._still_seconds, _LAST_STILL_SECONDS)

    def oldest_held(self) -> dict[str, int]:
        """Return the number of the oldest batch that is held of each producer."""
        with self._changed:
            return {
                producer: min(one.sequence for one in self._held if one.producer == producer)
                for producer in {one.producer for one in self._held}
            }

    def _stir(self) -> None:
        self._again = None
        self._still_since, self._still_seconds = self._clock(), _FIRST_STILL_SECONDS

    def _send_again(self, entries: list[SpoolEntry]) -> None:
        for entry in entries:
            self._held.remove(entry)
        self._entries.extendleft(sorted(entries, key=lambda entry: -entry.sequence))

    def _release(self, entry: SpoolEntry) -> None:
        self._held.remove(entry)
        self._bytes[entry.path is None] -= entry.num_bytes
        _delete(entry)

    # --- both ----------------------------------------------------------------------------

    def waiting(self) -> tuple[int, int]:
        """Return (batches, bytes) that wait to be sent, the bytes with those that are held."""
        with self._changed:
            return len(self._entries), sum(self._bytes.values())

    def is_empty(self) -> bool:
        """Return whether nothing waits, and all that was accepted is stored."""
        with self._changed:
            return not self._entries and not self._held

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
            self._append(
                SpoolEntry(header.sequence, header.num_items, size, path, producer=header.producer)
            )
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
