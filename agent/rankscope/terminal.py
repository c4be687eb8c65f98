"""Text of strangers on a terminal: what would act there is shown, not sent.

Log lines, stacks, names of hosts and answers of servers may hold escape sequences, which move the
cursor, change the title, or have the terminal type; and marks of direction, which turn a line
around. Everything that a command prints goes through `shown`, or through a `SafeConsole`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 but tab and line feed, DEL, C1 (of which U+009B begins a sequence), marks of direction
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Return a text in which nothing acts: ESC becomes the sign for it, a mark of direction its
    number.
    """
    if text.isascii() and text.isprintable():
        return text
    return _ACTS.sub(_sign, text.replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Return a text in one line in which nothing acts."""
    return " ".join(shown(str(text)).split())


def shown_json(text: str) -> str:
    """Return the same JSON with what would act on a terminal written as numbers."""
    return _ACTS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class SafeConsole(Console):
    """A console that sends its own styles and shows those that came in a text."""

    outlives_reader = False  # a pipe that is closed ends the program, as it does others

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of what is to be printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """End the program, or print nothing more where its exit code is the answer."""
        if not self.outlives_reader:
            super().on_broken_pipe()
        self.quiet = True
        drop(cast(TextIO, self.file))

    def print_json(self, json: str | None = None, **options: Any) -> None:
        """Print JSON; rich passes on what json.dumps leaves as it is."""
        super().print_json(None if json is None else shown_json(json), **options)


def drop(stream: TextIO) -> None:
    """Send what a stream still holds nowhere; else Python writes it at its end, and ends with 120.

    For a stream that takes nothing any more: a pipe that is not read, a disk that is full.
    """
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
