"""How far the preflight is, on stderr: one line that changes, or one line per stage in a log."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import TextIO

from rankscope.preflight.report.words import clean, cut

_WORDS = {
    "ssh": "starting agents over ssh on",
    "quiet": "waiting",
    "facts": "looking at this node",
    "waiting": "waiting for",
    "turn": "MASTER_PORT of this node is in use: waiting for the end of",
    "paths": "testing the paths",
    "bandwidth": "measuring bandwidth",
    "collective": "running a collective",
}
_PAUSE_S = 0.1  # between two drawings: a terminal over ssh must keep up


class Live:
    """Shows the stages of a preflight; a context, so that its line never outlives it."""

    def __init__(self, stream: TextIO, prefix: str = "rankscope preflight: ") -> None:
        self._stream, self._prefix = stream, prefix
        self._is_terminal = stream.isatty()
        self._stage = ""
        self._drawn_at = 0.0

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._is_terminal and self._stage:
            self._write("\r\x1b[K")

    def stage(self, name: str, detail: str = "") -> None:
        """Show what is being done; called again as `detail` changes."""
        is_new = name != self._stage
        text = clean(f"{_WORDS.get(name, name)} {detail}")
        self._stage = name
        if not self._is_terminal:
            if is_new:
                self._write(f"{self._prefix}{text}\n")
            return
        now = time.monotonic()
        if is_new or now - self._drawn_at >= _PAUSE_S:
            self._drawn_at = now
            columns = shutil.get_terminal_size().columns
            self._write(f"\r\x1b[K{cut(text, columns - 1)}")

    def note(self, text: str) -> None:
        """Show a line that stays, whole: it may be a command to copy."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        self._write(f"{clear}{self._prefix}{clean(text)}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, UnicodeEncodeError):
            self._is_terminal = False  # it is not read: the preflight continues
