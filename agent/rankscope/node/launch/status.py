"""One line below the output of a launched command, on a terminal: how far it is, what it loses.

It is there only where the last thing that the command wrote was a whole line: in the middle of a
line, as of a progress bar, and in a program of the whole screen there is none.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING, rank_directories
from rankscope.node.launch.verdicts import Verdicts
from rankscope.terminal import one_line

LOOK_SECONDS = 1.0
_COLUMNS = 80  # of a terminal that does not say
_MOST_RANKS = 4  # that are named
_FULL_SCREEN = (b"\x1b[?1049h", b"\x1b[?47h", b"\x1b[?1047h")  # xterm: another buffer
_ERASE = b"\r\x1b[2K"


class StatusLine:
    """The line, and the order of what is written to its terminal.

    `write` writes bytes there; it returns whether it could.
    """

    def __init__(self, terminal: int, write: Callable[[int, bytes], bool]) -> None:
        self._terminal, self._write = terminal, write
        self._lock = threading.RLock()
        self._text = ""
        self._is_drawn = False
        self._may_draw = True  # a whole line was written last
        self._is_off = os.environ.get("TERM", "dumb") == "dumb"

    def show(self, text: str) -> None:
        """Show a text from now on, nothing for an empty one."""
        with self._lock:
            self._erase()
            self._text = one_line(text)
            self._draw()

    def pass_on(self, data: bytes) -> bool:
        """Write what came from the command, above the line. Returns whether it was written."""
        with self._lock:
            self._erase()
            self._is_off = self._is_off or any(start in data for start in _FULL_SCREEN)
            is_written = self._write(self._terminal, data)
            self._may_draw = data.endswith(b"\n")
            self._draw()
            return is_written

    def above(self, say: Callable[[str], None], text: str) -> None:
        """Let `say` print a line of our own above the line."""
        with self._lock:
            self._erase()
            say(text)
            self._draw()

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(self._terminal, _ERASE)
            self._is_drawn = False

    def _draw(self) -> None:
        if self._is_off or not self._text or not self._may_draw:
            return
        try:
            columns = os.get_terminal_size(self._terminal).columns
        except OSError:  # it is gone
            return
        text = self._text[: (columns or _COLUMNS) - 1].encode(errors="replace")
        self._is_drawn = self._write(self._terminal, b"\x1b[2m%s\x1b[0m\r" % text)


class Progress:
    """Says on the line how far the ranks of this node are; what they lose is the server's word."""

    def __init__(self, line: StatusLine, directory: Path, verdicts: Verdicts) -> None:
        self._line, self._directory, self._verdicts = line, directory, verdicts
        self._stop = threading.Event()
        self._first: tuple[float, int] | None = None  # when which step was seen
        self._thread = threading.Thread(target=self._follow, name="rankscope-status", daemon=True)

    def start(self) -> None:
        """Follow the run from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Take the line away."""
        self._stop.set()
        self._thread.join()
        self._line.show("")

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._line.show(self._text())

    def _text(self) -> str:
        steps = steps_of(self._directory)
        if not any(steps.values()):
            return ""
        newest, now = max(steps.values()), time.monotonic()
        if self._first is None or newest < self._first[1]:  # a new attempt
            self._first = now, newest
        since, first = self._first
        step_ms = (now - since) * 1e3 / (newest - first) if newest > first else None
        if newest - first >= 50:  # the pace of the newest steps, not of all
            self._first = now - (now - since) / 2, newest - (newest - first) // 2
        seen = self._verdicts.seen
        return status_text(steps, step_ms, None if seen is None else seen.verdict)


def steps_of(directory: Path) -> dict[int, int]:
    """Return the step in progress of each rank of the latest attempt; 0 before the first."""
    steps = {}
    for key in rank_directories(directory, latest_only=True):
        try:
            with (directory / key / COLLECTIVES_RING).open("rb") as file:
                header = file.read(ring.STEP_AT + ring.U64.size)
            identity = ring.IDENTITY.unpack_from(header)
            (step,) = ring.U64.unpack_from(header, ring.STEP_AT)
        except (OSError, struct.error):  # it is being made
            continue
        if identity[0] == ring.MAGIC:
            steps[identity[6]] = step
    return steps


def status_text(
    steps: dict[int, int], step_ms: float | None, verdict: dict[str, Any] | None
) -> str:
    """Return how far the ranks are, how long a step takes, what is lost and by which ranks."""
    newest = max(steps.values())
    parts = [f"step {newest:,}"]
    behind = sorted(rank for rank, step in steps.items() if step < newest - 1)
    if behind:
        parts.append(f"{_named(behind)} at step {min(steps.values()):,}")
    if step_ms is not None:
        parts.append(
            f"{step_ms:,.3g} ms a step" if step_ms < 1e3 else f"{step_ms / 1e3:,.3g} s a step"
        )
    if verdict is not None:
        lost = verdict.get("cost_throughput_ratio")
        parts += [f"{100 * lost:.0f} % of throughput lost"] if lost else []
        parts += [f"worst: {_named(verdict['ranks'])}"] if verdict["ranks"] else []
    return f"rankscope: {', '.join(parts)}"


def _named(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS:,} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
