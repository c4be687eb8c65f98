"""Writes the answer where it was asked for: screen, JSON, JUnit, page, list of nodes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rankscope.preflight.report import junit, screen, stored
from rankscope.preflight.report.nodes import bad_nodes, compress
from rankscope.preflight.report.page import page
from rankscope.preflight.report.summary import Summary
from rankscope.terminal import drop


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which reports are wanted, and where: a path, or "-" for stdout; empty: not at all."""

    json: str = ""
    junit: str = ""
    html: str = ""
    exclude_list: str = ""
    fail_on: str = "fail"
    is_verbose: bool = False

    @property
    def screen_stream(self) -> TextIO:
        """Return where the screen goes: stdout, unless another report was sent there."""
        is_taken = "-" in (self.json, self.junit, self.html, self.exclude_list)
        return sys.stderr if is_taken else sys.stdout


def deliver(summary: Summary, wanted: Wanted) -> list[str]:
    """Write all reports. Returns what could not be written, one line each."""
    nodes = bad_nodes(summary.verdict, wanted.fail_on == "warn")
    documents: list[tuple[str, str, Callable[[], bytes]]] = [
        ("--json", wanted.json, lambda: stored.encode(summary, nodes)),
        ("--junit", wanted.junit, lambda: junit.encode(summary, wanted.fail_on)),
        ("--html", wanted.html, lambda: page(summary).encode()),
        ("--exclude-list", wanted.exclude_list, lambda: f"{compress(nodes)}\n".encode()),
    ]
    errors = []
    try:
        screen.show(summary, screen.console_of(wanted.screen_stream), wanted.is_verbose)
    except OSError as error:
        drop(wanted.screen_stream)
        errors.append(f"the answer cannot be shown: {error.strerror or error}")
    for option, place, encode in documents:
        if not place:
            continue
        try:
            _write(place, encode())
        except OSError as error:
            errors.append(f"{option}: {place} cannot be written: {error.strerror or error}")
    return errors


def write_out(data: bytes) -> None:
    """Write to stdout; that a reader has gone is no error. Raises OSError."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    except OSError:
        drop(sys.stdout)
        raise


def _write(place: str, data: bytes) -> None:
    """Write the whole file or nothing: a reader never sees a half of it."""
    if place == "-":
        write_out(data)
        return
    path = Path(place)
    if path.exists() and not path.is_file():  # /dev/stdout, a named pipe
        path.write_bytes(data)
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """Return this process's mask; there is no way to read it without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
