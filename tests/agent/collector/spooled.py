"""What waits in a spool."""

from __future__ import annotations

from pathlib import Path

from rankscope.node.upload.spool import SpoolEntry
from rankscope.wire import zstd

_MOST_BYTES = 64 << 20


def spooled(run: Path) -> list[Path]:
    return sorted((run / "node" / "spool").glob("*.batch"))


def is_spooled(run: Path, words: str) -> bool:
    """Return whether a batch that waits in a file holds these words."""
    bodies = (SpoolEntry(0, 0, 0, path).body() for path in spooled(run))
    return any(words.encode() in zstd.unpack(body, _MOST_BYTES) for body in bodies)
