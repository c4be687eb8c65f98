"""Reading what the kernel says: cheap, bounded, and -1 for what is not known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from rankscope.node.sources.base import Skipped

_READ_BYTES = 1 << 16


def read(path: str | Path) -> str:
    """Return a file of /proc or /sys, at most 64 KiB of it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _READ_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def read_whole(path: str | Path) -> str:
    """Return a file of /proc that may be longer. Raises OSError."""
    parts = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while part := os.read(descriptor, _READ_BYTES):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def read_or_none(path: str | Path) -> str | None:
    """Return a file's text without white space around it, None where it cannot be read."""
    try:
        return read(path).strip()
    except OSError:
        return None


def number(text: str | None) -> int:
    """Return a whole number, -1 where the text is none or is no number."""
    try:
        return -1 if text is None else int(text)
    except ValueError:
        return -1


def pairs(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of lines such as `pgfault 123` and `MemFree:  123 kB`."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0].rstrip(":"), int(words[1])


def need(path: Path, why: str) -> None:
    """Raise Skipped unless this can be read; `why` says what its absence means."""
    try:
        read(path)
    except FileNotFoundError:
        raise Skipped(f"no {path}: {why}") from None
    except OSError as error:
        raise Skipped(f"{path}: {error.strerror}") from error


def uptime_seconds() -> float:
    """Return the time since the machine was started, with what it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def waited_seconds() -> float | None:
    """Return how long this thread was ready to run without a processor; None if not known."""
    words = (read_or_none("/proc/thread-self/schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) == 3 else None
