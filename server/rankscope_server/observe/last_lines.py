"""The newest lines of output of each rank and of the launcher: what a program said before it left.

Some leave with an exit code and one line that says why. It is no exception, and no entry of the
known errors name it: what a training script says of its own settings is none.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

from rankscope.wire.schema import LogLine
from rankscope_server.findings.text import cut

_MOST_OF_RANK, _MOST_OF_LAUNCHER = 2, 24
_MOST_TEXT = 400
_STREAMS = frozenset({"stdout", "stderr", "logging"})
# what launchers say of ranks that ended is no reason of theirs
_OF_LAUNCHERS = re.compile(
    r"^[IWEF]\d{4} .*torch/distributed/|^=+(?:\n|$)|torch[./]distributed[./]elastic"
)
_TRACEBACK = "Traceback (most recent call last)"
_GIVES_REASON = re.compile(
    r"(?i)error|exception|fail|fatal|abort|invalid|illegal|cannot|can't|could not|unable|must |"
    r"not found|no such|missing|denied|refused|unknown|unrecognized|unexpected|usage:|"
    r"not supported|unsupported|no space|out of memory|need(?:s|ed)? |require|"
    r"\b(?:is|are) (?:no|not) |\bdo(?:es)? not |\bknown \w+: |choose |allowed|expected|argument"
)


class LastLines:
    """The newest lines by rank, that of the launcher with it; `take` any, in any order, twice."""

    def __init__(self) -> None:
        self._lines: dict[int, list[tuple[int, str]]] = {}  # by rank, oldest first

    def take(self, line: LogLine) -> None:
        """Take a line if it is among the newest of its rank."""
        if line.stream not in _STREAMS:
            return
        known = self._lines.setdefault(line.rank, [])
        most = _MOST_OF_RANK if line.rank >= 0 else _MOST_OF_LAUNCHER
        if len(known) == most and line.time_ns < known[0][0]:
            return
        text = line.message.rstrip()
        # a launcher that fails by itself says so in a traceback through its own files
        said = text.rpartition("\n")[2] if _TRACEBACK in text else text
        if not text.strip() or _OF_LAUNCHERS.search(said):
            return
        if len(text) > _MOST_TEXT:  # of a traceback the end, of one long line its beginning
            last = text.rpartition("\n")[2]
            text = last[:_MOST_TEXT] if len(last) > _MOST_TEXT else text[-_MOST_TEXT:]
        newest = (line.time_ns, text)
        if newest not in known:
            bisect.insort(known, newest)
            del known[:-most]

    def before(self, rank: int, time_ns: int, before_ns: int, after_ns: int) -> list[str]:
        """Return what a rank said last around a moment, the newest first."""
        return [
            text
            for said_ns, text in reversed(self._lines.get(rank, ()))
            if time_ns - before_ns <= said_ns <= time_ns + after_ns
        ]

    def newest(self, rank: int) -> list[str]:
        """Return what a rank said last, the newest first."""
        return [text for _, text in reversed(self._lines.get(rank, ()))]


def why_of(texts: Sequence[str]) -> str:
    """Return the newest line that says why a program left, empty where none does.

    Of a traceback it is the last line, which names the exception. An indented line continues the
    one before it.
    """
    found = ""
    for place, text in enumerate(texts):
        last = text.rpartition("\n")[2]
        if not _GIVES_REASON.search(last):
            continue
        if last[:1].isspace() and "\n" not in text:
            begun = next((one for one in texts[place + 1 :] if not one[:1].isspace()), "")
            last = f"{begun.rpartition(chr(10))[2]} {last.strip()}"
        found = found or cut(last.strip())
        if not last.lower().startswith("usage:"):  # which argument is wrong is said beside it
            return cut(last.strip())
    return found


def last_of(texts: Sequence[str]) -> str:
    """Return the newest line that holds a word, empty where there is none."""
    lines = (text.rpartition("\n")[2].strip() for text in texts)
    return cut(next((line for line in lines if any(map(str.isalpha, line))), ""))
