"""Follows a journal segment by segment, and deletes the segments that are on their way.

Names of groups and call sites are kept in the file `names` (in the form of a journal) before the
segment that defined them is deleted, so that a restarted collector still knows them.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rankscope.files import journal
from rankscope.files.run_directory import replace_file
from rankscope.node.offsets import RankOffsets

NAMES = "names"
MAX_BYTES = 2 << 20  # per turn
MAX_FRAMES = 5000
LAST_FRAME_SECONDS = 0.2  # another thread may still write its frame into the segment before
_MAX_NAMES = 65_536
_MAX_CALL_SITE = 4_000
_MAX_GROUP = 250


class _Peek(msgspec.Struct):
    kind: str


_peek = msgspec.msgpack.Decoder(_Peek).decode
logger = logging.getLogger(__name__)


@dataclass
class Names:
    """Words that slots refer to by number."""

    groups: dict[int, str] = field(default_factory=dict)
    call_sites: dict[int, str] = field(default_factory=dict)

    def take(self, kind: int, body: bytes) -> None:
        """Take in a frame of kind GROUP or CALL_SITE; what is too short or too much is ignored."""
        if len(body) < journal.INDEXED.size:
            return
        (index,) = journal.INDEXED.unpack_from(body)
        text = body[journal.INDEXED.size :].decode(errors="replace").replace("\0", "\ufffd")
        if kind == journal.CALL_SITE and len(self.call_sites) < _MAX_NAMES:
            self.call_sites[index] = text[-_MAX_CALL_SITE:]
        elif kind == journal.GROUP and len(self.groups) < _MAX_NAMES:
            if len(text) > _MAX_GROUP:  # cut, and still one of its own
                text = f"{text[: _MAX_GROUP - 10]}~{zlib.crc32(text.encode()):08x}"
            self.groups[index] = text

    def save(self, path: Path) -> None:
        """Write all names as frames of a journal. Raises OSError."""
        frames = []
        for kind, words in ((journal.GROUP, self.groups), (journal.CALL_SITE, self.call_sites)):
            for index, text in words.items():
                body = journal.INDEXED.pack(index) + text.encode()
                frames.append(journal.FRAME.pack(len(body), zlib.crc32(body), kind) + body)
        replace_file(path, b"".join(frames))


class JournalFollower:
    """One journal directory. `on_loss(reason, count)` hears what could not be read.

    `on_output` gets the bodies of frames of kind OUTPUT.
    """

    def __init__(
        self,
        directory: Path,
        offsets: RankOffsets,
        on_loss: Callable[[str, int], None],
        on_output: Callable[[bytes], None] = lambda body: None,
    ) -> None:
        self.names = Names()
        self._directory = directory
        self._segment = offsets.segment
        self._offset = offsets.offset
        self._searched = (-1, 0)  # segment, and its size when no whole frame was behind `_offset`
        self._committed_segment = 0  # nothing is deleted before the first commit of this life
        self._on_loss = on_loss
        self._on_output = on_output
        self._newer_since: float | None = None  # when a newer segment was seen first
        self._learn_names()

    def read(self, forward: Callable[[bytes], None]) -> bool:
        """Pass records on, at most some megabytes; return whether all that is there was read."""
        budget = MAX_BYTES
        while budget > 0:
            taken, hit_limit = self._read_segment(forward, budget)
            budget -= taken
            if hit_limit:
                return False
            if not self._advance():
                return self._newer_since is None
        return False

    def end(self) -> None:
        """Count what is left, which is no whole frame: everything was read, no writer is there."""
        path = self._path()
        if path.exists():
            self._skip_to(path.stat().st_size)

    def close(self) -> None:
        """Forget the names, and the listener to losses."""
        self.names = Names()
        self._on_loss = lambda reason, count: None

    def save(self, offsets: RankOffsets) -> None:
        """Write how far this journal has been read."""
        offsets.segment, offsets.offset = self._segment, self._offset

    def committed(self, offsets: RankOffsets) -> None:
        """Take note that everything up to these offsets is durable elsewhere."""
        self._committed_segment = offsets.segment

    def delete_sent(self) -> None:
        """Delete the segments that are behind the committed one. Raises OSError."""
        present = journal.segments(self._directory)
        sent = [path for number, path in present if number < self._committed_segment]
        if sent:
            self.names.save(self._directory / NAMES)
            for path in sent:
                path.unlink(missing_ok=True)

    def keep_bounded(self) -> int:
        """Delete the oldest segment but the first when the writer would stop; return how many.

        This is for a node without a server, where nothing is ever sent: the start of the run and
        its latest part stay.
        """
        present = journal.segments(self._directory)
        if len(present) < journal.MAX_SEGMENTS or present[1][0] >= self._segment:
            return 0
        self.names.save(self._directory / NAMES)
        present[1][1].unlink(missing_ok=True)
        return 1

    def _read_segment(self, forward: Callable[[bytes], None], budget: int) -> tuple[int, bool]:
        path = self._path()
        try:
            size = path.stat().st_size
            if size < self._offset:  # the writer appends: what it wrote since begins the file
                self._on_loss("segment cut short", 1)
                self._offset = 0
            if size <= self._offset or (self._segment, size) == self._searched:
                return 0, False
            start = self._offset
            frames = journal.read_frames(path, start)
            for count, (kind, body, behind) in enumerate(frames, 1):
                self._skip_to(behind - len(body) - journal.FRAME.size)
                self._take(kind, body, forward)
                self._offset = behind
                if behind - start > budget or count >= MAX_FRAMES:
                    return behind - start, True
        except FileNotFoundError:
            return 0, False
        self._searched = (self._segment, size)
        return self._offset - start, False

    def _skip_to(self, offset: int) -> None:
        """Leave out what is damaged up to there, if anything is, and count it."""
        if offset > self._offset:
            logger.warning("%s: damaged from byte %d to %d", self._path(), self._offset, offset)
            self._on_loss("torn frame", 1)
            self._offset = offset

    def _path(self) -> Path:
        return self._directory / f"journal.{self._segment}"

    def _take(self, kind: int, body: bytes, forward: Callable[[bytes], None]) -> None:
        if kind == journal.OUTPUT:
            self._on_output(body)
            return
        if kind != journal.RECORD:
            self.names.take(kind, body)
            return
        try:
            _peek(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._on_loss("malformed record", 1)
            return
        forward(body)

    def _advance(self) -> bool:
        """Go to the next segment, if there is one and nothing more can come in this one."""
        present = (number for number, _ in journal.segments(self._directory))
        newer = [number for number in present if number > self._segment]
        if not newer:
            self._newer_since = None
            return False
        now = time.monotonic()
        if self._newer_since is None:
            self._newer_since = now
        if now - self._newer_since < LAST_FRAME_SECONDS:
            return False
        self._newer_since = None
        self.end()
        self._segment, self._offset = newer[0], 0
        return True

    def _learn_names(self) -> None:
        """Read the names out of what an earlier collector has read."""
        files: list[tuple[Path, int | None]] = [(self._directory / NAMES, None)]
        for number, path in journal.segments(self._directory):
            if number < self._segment:
                files.append((path, None))
            elif number == self._segment:
                files.append((path, self._offset))
        for path, upto in files:
            if not path.exists():
                continue
            for kind, body, behind in journal.read_frames(path, 0):
                if upto is not None and behind > upto:
                    break
                if kind != journal.RECORD:
                    self.names.take(kind, body)
