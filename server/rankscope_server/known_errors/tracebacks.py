"""Keeps a traceback together, also where lines of other ranks are between its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankscope_server.known_errors.line_owner import owner_of

MAX_LINES = 400  # of one file, that a traceback may stretch over
MAX_BYTES = 64 << 10
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line \d+, in (.{1,200})')
_FINAL = re.compile(r"([A-Za-z_][\w.]{0,199})(?::\s|:?$)(.*)", re.DOTALL)
_ELSEWHERE = ("site-packages/", "dist-packages/", "/lib/python", "<frozen ", "<string>")
HEADER = "traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Traceback:
    """One traceback: what was raised, and through which lines of the user's own project."""

    type: str
    message: str
    frames: tuple[str, ...]  # "train.py:main", outermost first, in the project if any are
    final_at: int  # where in the block its last line begins
    final: str  # that line as it is


def read_traceback(block: bytes, start: int, is_from_srun: bool) -> Traceback | None:
    """Return the traceback whose header begins at `start`, None if its end is not there."""
    header, at = _next_line(block, start)
    owner, text = owner_of(header, is_from_srun)
    margin = text[: text.lower().find(HEADER)] if HEADER in text.lower() else ""
    frames: list[str] = []
    for _ in range(MAX_LINES):
        if at >= len(block) or at - start > MAX_BYTES:
            return None
        begin = at
        line, at = _next_line(block, at)
        here, text = owner_of(line, is_from_srun)
        if here != owner:
            continue  # of another rank
        text = text.removeprefix(margin)
        if found := _FRAME.match(text):
            frames.append(f"{_short(found[1])}:{found[2].strip()}")
        elif not text.strip() or text[0] in " \t|":
            continue
        elif frames and (last := _FINAL.match(text)):
            return Traceback(last[1], last[2].strip()[:500], _own(frames), begin, line)
        else:
            return None
    return None


def _next_line(block: bytes, at: int) -> tuple[str, int]:
    end = block.find(b"\n", at)
    end = len(block) if end < 0 else end
    return block[at : min(end, at + 4000)].decode(errors="replace").rstrip("\r"), end + 1


def _short(path: str) -> str:
    if any(part in path for part in _ELSEWHERE):
        return "*" + path.rpartition("/")[2]
    return path.rpartition("/")[2]


def _own(frames: list[str]) -> tuple[str, ...]:
    mine = [frame for frame in frames if not frame.startswith("*")]
    return tuple(mine or [frame.removeprefix("*") for frame in frames[-3:]])
