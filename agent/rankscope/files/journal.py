"""The journal: what is sparse, appended to files of frames that survive the death of the writer.

A frame is length (u32), crc32 (u32), kind (u8) and a body; one `write` with O_APPEND each, so
threads and forks never interleave and a torn tail is cut at the first bad checksum. A body of
kind RECORD is a record of the wire, ready to send; one of kind OUTPUT is text that Python code
wrote to a stream, which the collector makes lines of. The journal is a row of segments
`journal.0`, `journal.1`, ...: the collector deletes what it has sent, and a writer that finds
MAX_SEGMENTS left writes nothing but errors until there is room again.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rankscope.files.append_file import AppendFile

FRAME = struct.Struct("<IIB")
RECORD, GROUP, CALL_SITE = 1, 2, 3  # GROUP and CALL_SITE: u32 index, then the name in UTF-8
INDEXED = struct.Struct("<I")
OUTPUT = 4  # OUTPUT_HEAD, then text in UTF-8: whole lines, without the last line end
OUTPUT_HEAD = struct.Struct("<QIB")  # wall ns, step, index into STREAMS
STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
MAX_BODY_BYTES = 1 << 20
SEGMENT_BYTES = 8 << 20
MAX_SEGMENTS = 4
_RETRY_SECONDS = 1.0


class JournalWriter:
    """Appends frames. Safe from any thread; never raises on a full disk, it counts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        present = segments(directory)  # of an earlier writer, whose reader may be behind them
        self._segment = present[-1][0] + 1 if present else 0
        self._written = 0
        self._retry_at = 0.0
        self._file = AppendFile(self._path(self._segment))
        self._is_closed = False
        self.dropped = 0  # frames lost because the journal or the disk was full
        self.last_error = ""

    def append(self, kind: int, body: bytes, *, urgent: bool = False) -> bool:
        """Write one frame and return whether it was kept. `urgent` ignores the segment limit."""
        if len(body) > MAX_BODY_BYTES:
            self.dropped += 1
            self.last_error = "frame too large"
            return False
        if not self._is_open():
            self.dropped += 1
            return False
        if self._written > SEGMENT_BYTES and not self._next_segment() and not urgent:
            self.dropped += 1
            return False
        frame = FRAME.pack(len(body), zlib.crc32(body), kind) + body
        try:
            written = os.write(self._file.descriptor, frame)
        except OSError as error:
            self.dropped += 1
            self.last_error = error.strerror or str(error)
            return False
        self._written += written
        if written != len(frame):  # the disk filled up in mid-frame: begin anew behind the tear
            self.dropped += 1
            self.last_error = "No space left on device"
            self._written = SEGMENT_BYTES + 1
            return False
        return True

    def close(self) -> None:
        """Close the file; later appends are dropped."""
        self._file.close()
        self._is_closed = True

    def _is_open(self) -> bool:
        """Return whether frames can be written; opens a segment anew that the script closed."""
        if self._is_closed:
            self.last_error = "closed"
            return False
        if self._file.is_open():
            return True
        try:
            self._file.open(self._path(self._segment))
        except OSError as error:
            self.last_error = error.strerror or str(error)
            return False
        return True

    def _next_segment(self) -> bool:
        now = time.monotonic()
        if now < self._retry_at:
            return False
        if len(segments(self._directory)) >= MAX_SEGMENTS:
            self._retry_at = now + _RETRY_SECONDS
            self.last_error = "journal full"
            return False
        try:
            self._file.replace(self._path(self._segment + 1))
        except OSError as error:
            self._retry_at = now + _RETRY_SECONDS
            self.last_error = error.strerror or str(error)
            return False
        self._segment += 1
        self._written = 0
        return True

    def _path(self, segment: int) -> Path:
        return self._directory / f"journal.{segment}"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """Return the segments present as (number, path), oldest first."""
    found = []
    for path in directory.glob("journal.*"):
        suffix = path.name.partition(".")[2]
        if suffix.isdecimal():
            found.append((int(suffix), path))
    return sorted(found)


def read_frames(path: Path, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield (kind, body, offset behind the frame) from `offset` up to the first torn frame."""
    with path.open("rb") as file:
        file.seek(offset)
        while True:
            head = file.read(FRAME.size)
            if len(head) < FRAME.size:
                return
            length, checksum, kind = FRAME.unpack(head)
            if length > MAX_BODY_BYTES:
                return
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != checksum:
                return
            offset += FRAME.size + length
            yield kind, body, offset
