"""SQLite's write-ahead log from outside: where its transactions end, what a checkpoint has taken.

The format is that of https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
_BACKFILLED_AT = 96  # in the index: after two copies of its header, in the machine's byte order


@dataclass(frozen=True, slots=True)
class Wal:
    """What is in a log; positions are bytes of the file."""

    commits: tuple[int, ...]  # where each transaction ends
    end: int  # of its last frame, which may be one of a transaction that did not end
    taken: int  # up to here a checkpoint has copied it, which synced it before

    @property
    def is_cut_in_a_transaction(self) -> bool:
        """Return whether frames of a transaction that did not end are there."""
        return self.end > (self.commits[-1] if self.commits else HEADER_BYTES)


def read_wal(database: Path) -> Wal:
    """Return what is in the log of a database that no process has open."""
    file = database.with_name(database.name + "-wal")
    data = file.read_bytes() if file.exists() else b""
    if len(data) < HEADER_BYTES:
        return Wal((), 0, 0)
    page_bytes, salts = struct.unpack_from(">I", data, 8)[0], data[16:24]
    size = FRAME_HEADER_BYTES + page_bytes
    at, commits = HEADER_BYTES, []
    while at + size <= len(data) and data[at + 8 : at + 16] == salts:
        at += size
        if struct.unpack_from(">I", data, at - size + 4)[0]:  # the pages of the database after it
            commits.append(at)
    index = database.with_name(database.name + "-shm")
    if not index.exists():
        return Wal(tuple(commits), at, 0)
    frames = struct.unpack_from("=I", index.read_bytes(), _BACKFILLED_AT)[0]
    return Wal(tuple(commits), at, HEADER_BYTES + frames * size if frames else 0)
