"""Data in files, read window by window as it is needed: it may go away, and come back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from rankscope_trainer.data import ByteWindows
from rankscope_trainer.supply import Pauses, is_gone


class DataSource:
    """A file, or the files of a directory in the order of their names, read as one text."""

    def __init__(self, path: str) -> None:
        """Note the files and their sizes. Raises OSError where there are none."""
        root = Path(path)
        files = sorted(entry for entry in root.rglob("*") if entry.is_file())
        self._files = [(file, file.stat().st_size) for file in files or [root]]

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return some bytes. Raises OSError where not all of them are there any more."""
        parts: list[bytes] = []
        for file, size in self._files:
            here = min(num_bytes, size - start)
            if here > 0:
                parts.append(_read(file, start, here))
                num_bytes -= here
            start = max(start - size, 0)
        return b"".join(parts)


class FileWindows(ByteWindows):
    """Windows that are read from their source again each time."""

    def __init__(
        self,
        source: DataSource,
        num_bytes: int,
        context: int,
        on_read: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Take the first `num_bytes` of the source."""
        super().__init__(b"", context, on_read)
        self._source = source
        self._num_bytes = num_bytes  # from which follows the number of windows

    def read(self, start: int, num_bytes: int) -> bytes:
        """Read from the source."""
        return self._source.read(start, num_bytes)


def open_source(path: str, max_bytes: int, wait_seconds: float) -> tuple[DataSource, bytes]:
    """Return the source and its text; wait for it, if it is not there yet."""
    pauses = Pauses(wait_seconds)
    while True:
        try:
            source = DataSource(path)
            return source, source.read(0, max_bytes)
        except OSError as error:
            if not is_gone(error) or not pauses.pause():
                raise


def _read(file: Path, start: int, num_bytes: int) -> bytes:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        data = os.pread(descriptor, num_bytes, start)
    finally:
        os.close(descriptor)
    if len(data) < num_bytes:
        raise OSError(errno.EIO, "is shorter than it was", str(file))
    return data
