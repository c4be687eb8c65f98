"""A file whose bytes are counted as they are read, for progress."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO


class Counted(io.RawIOBase):
    """Passes bytes on and counts them."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill a buffer; return how many bytes came."""
        view = memoryview(buffer)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._on_bytes(len(data))
        return len(data)
