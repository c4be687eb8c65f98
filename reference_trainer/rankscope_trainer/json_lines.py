"""JSON lines that all ranks of a host may append to one file."""

from __future__ import annotations

import json
import os
from pathlib import Path


class JsonLines:
    """A file that lines are appended to; without a path nothing is written.

    A line is a single `write` to a file opened for appending: lines of several ranks do not mix,
    and it is in the file before the call returns.
    """

    def __init__(self, path: str) -> None:
        """Name the file; it is opened for each line."""
        self._path = path

    def write(self, **line: object) -> None:
        """Append one line."""
        if not self._path:
            return
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
