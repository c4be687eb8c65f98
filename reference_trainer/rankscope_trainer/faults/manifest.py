"""The manifest: what really fired, one JSON line for its start and one for its end.

A line is written by a single `write` to a file opened for appending, so all ranks of a host may
share one file, and it is in the file before the fault acts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


class Manifest:
    """A file that lines are appended to; without a path it keeps nothing."""

    def __init__(self, path: str) -> None:
        """Name the file; it is opened when the first line is written."""
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
