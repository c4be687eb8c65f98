"""Errors that C++ can only print before it ends the process, recognised by their words.

The forms are those of PyTorch's sources (ProcessGroupNCCL.cpp, 2.6 to 2.13) and of libstdc++.
Of those of NCCL the watchdog's time-out and what follows it were provoked (2.11); others were read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_HINTS = (
    "atchdog", "Heartbeat monitor", "taking the entire process down", "terminate called",
    "Fatal Python error: ",
)  # fmt: skip
_RANK = re.compile(r"\bRank (\d{1,9})\]")
_WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_RAN_FOR = re.compile(r"ran for (\d+) milliseconds")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']{1,200})'")
_WHAT = re.compile(r"(?m)^\s*what\(\):\s*(.*)$")
Where = Literal["collective", "fatal_signal"]


@dataclass(frozen=True)
class NativeError:
    """What a line says. `key` is the same for all lines that tell the same of one rank."""

    type: str
    message: str
    where: Where
    rank: int | None = None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What tells one error from another."""
        work = _WORK.search(self.message)
        return self.type, work[0] if work else "", self.rank


def recognise(text: str) -> NativeError | None:
    """Return the error that a line or block of output tells, None for every other one."""
    if not any(hint in text for hint in _HINTS):
        return None
    if text.startswith("Fatal Python error: "):  # faulthandler that the script switched on
        first = text.partition("\n")[0]
        kind = first.partition(": ")[2]
        return NativeError(kind[:200], first, "fatal_signal")
    if match := _TERMINATE.search(text):
        what = _WHAT.search(text)
        # what the backend throws is the consequence of another rank's trouble more often than not
        is_backends = "Dist" in match[1] or "atchdog" in text
        where: Where = "collective" if is_backends else "fatal_signal"
        return NativeError(match[1], what[1] if what else text, where, _rank(text))
    if "terminate called without an active exception" in text:
        return NativeError("std::terminate", text, "fatal_signal", _rank(text))
    return _of_watchdog(text)


def _of_watchdog(text: str) -> NativeError | None:
    rank = _rank(text)
    if "Watchdog caught collective operation timeout" in text:
        return NativeError("NCCL watchdog timeout", _of_work(text), "collective", rank)
    if "Watchdog caught" in text or "watchdog thread terminated with exception" in text:
        return NativeError("NCCL watchdog error", text, "collective", rank)
    if "Heartbeat monitor timed out" in text or "watchdog got stuck" in text:
        return NativeError("NCCL heartbeat monitor", text, "collective", rank)
    if "taking the entire process down" in text:
        return NativeError("NCCL takes the process down", text, "collective", rank)
    return None


def _rank(text: str) -> int | None:
    ranks = _RANK.findall(text)
    return int(ranks[-1]) if ranks else None


def _of_work(text: str) -> str:
    """Return for example "ALLREDUCE SeqNum=3 ran for 600012 ms" in front of a watchdog's line."""
    work, ran = _WORK.search(text), _RAN_FOR.search(text)
    if work is None:
        return text
    duration = f" ran for {ran[1]} ms" if ran else ""
    return f"{work[2]} SeqNum={work[1]}{duration}: {text}"
