"""The journal: what is sparse, appended to files of frames that survive the death of the writer.

A frame is length (u32), crc32 (u32), kind (u8) and a body; one `write` with O_APPEND each, so
threads and forks never interleave; what is damaged is skipped up to the next frame. A body of kind
RECORD is a record of the wire, ready to send; one of kind OUTPUT is text that Python code wrote to
a stream, which the collector makes lines of. The journal is a row of segments
`journal.0`, `journal.1`, ...: the collector deletes what it has sent, and a writer that finds
MAX_SEGMENTS left writes nothing but errors until there is room again.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

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
_BLOCK_BYTES = 1 << 20
_MOST_CHECKED_BYTES = 32 << 20  # of what looks like frames behind a damaged one
_LEAST_CHECKED_BYTES = 200  # what a short one costs beside its checksum
# Where a frame may begin: its length is of 1 to MAX_BODY_BYTES, its kind one of the four.
_HEAD = re.compile(rb"(?s)(?!\0\0\0\0)(?=(..[\0-\x10]\0)....[\1-\4])")


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
    """Yield (kind, body, offset behind the frame) from `offset` on; what is damaged is skipped.

    It ends where no whole frame follows: what is there may be one in the making.
    """
    with path.open("rb") as file:
        while True:
            frame = _frame_at(file, offset)
            if frame is None:
                following = _next_frame(file, offset + 1)
                if following is None:
                    return
                offset, frame = following
            kind, body = frame
            offset += FRAME.size + len(body)
            yield kind, body, offset


def _frame_at(file: BinaryIO, offset: int) -> tuple[int, bytes] | None:
    """Return kind and body of the frame that begins there, None where none is whole."""
    file.seek(offset)
    head = file.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    length, checksum, kind = FRAME.unpack(head)
    if length > MAX_BODY_BYTES or not kind:  # zeros are what a file system lost
        return None
    body = file.read(length)
    return (kind, body) if len(body) == length and zlib.crc32(body) == checksum else None


def _next_frame(file: BinaryIO, offset: int) -> tuple[int, tuple[int, bytes]] | None:
    """Return the first whole frame from `offset` on and where it begins.

    None where none is found with a bounded effort: noise may look like frames in any number.
    """
    budget = _MOST_CHECKED_BYTES
    while True:
        file.seek(offset)
        block = file.read(_BLOCK_BYTES + FRAME.size)
        for match in _HEAD.finditer(block):
            if frame := _frame_at(file, offset + match.start()):
                return offset + match.start(), frame
            budget -= _LEAST_CHECKED_BYTES + int.from_bytes(match[1], "little")
            if budget < 0:
                return None
        if len(block) < _BLOCK_BYTES + FRAME.size:
            return None
        offset += _BLOCK_BYTES
