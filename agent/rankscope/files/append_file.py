"""A file of ours in a process that is not ours: its number may be closed, and used again."""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """A file that is open for appending. A script may close all numbers from 3 up, as daemons do.

    What it opens then gets these numbers: ask `is_open` before each use.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self._known: tuple[tuple[int, int], ...] = ()
        self.open(path)

    def open(self, path: Path) -> None:
        """Open a file under a number of its own; what was open before stays. Raises OSError."""
        descriptor = _open(path)
        self._known = (_identity(descriptor),)
        self.descriptor = descriptor

    def is_open(self) -> bool:
        """Return whether the number is still that of this file."""
        try:
            return _identity(self.descriptor) in self._known
        except OSError:
            return False

    def replace(self, path: Path) -> None:
        """Open another file under the same number: a thread that uses it meets one or the other.

        Only where `is_open`. Raises OSError.
        """
        descriptor = _open(path)
        self._known = (*self._known[-1:], _identity(descriptor))
        os.dup2(descriptor, self.descriptor, inheritable=False)
        os.close(descriptor)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self.is_open():
            os.close(self.descriptor)
        self.descriptor = -1


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
