"""`--json` means the same in every command: one JSON object on stdout, where it fails too."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

Parsed = Callable[[argparse.Namespace], None]
_MOST_TEXT = 2_000


class _Watched:
    """A stream that knows whether it was written to, and the last of what was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_used = False
        self.text = ""

    def write(self, text: str) -> int:
        self.is_used = self.is_used or bool(text)
        self.text = (self.text + text)[-_MOST_TEXT:]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        self.is_used = self.is_used or name == "buffer"  # who asks for it writes bytes to it
        return getattr(self._stream, name)


def run(words: Sequence[str], command: Callable[[Parsed], int]) -> int:
    """Run a command. Where it failed, and `--json` was asked for, its error becomes the object.

    `command` passes on its arguments once they are parsed: until then the words decide.
    """
    if not _may_be_asked(words):
        return command(lambda arguments: None)
    is_asked = True

    def parsed(arguments: argparse.Namespace) -> None:
        nonlocal is_asked
        # the flag of a program that `rankscope run` starts is not ours
        is_asked = getattr(arguments, "json", True) in (True, "-")

    with _watched() as (out, err):
        try:
            code = command(parsed)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
            if is_asked:
                _print_error(out, err, code)
            raise
        if is_asked:
            _print_error(out, err, code)
        return code


def _may_be_asked(words: Sequence[str]) -> bool:
    """Return whether one object on stdout may be wanted; of preflight it may name a file."""
    own = list(words[: list(words).index("--")] if "--" in words else words)
    if "--json" not in own or "--help" in own or "-h" in own:
        return False
    after = own[own.index("--json") + 1 :]
    return own[0] != "preflight" or not after or after[0].startswith("-")


@contextlib.contextmanager
def _watched() -> Iterator[tuple[_Watched, _Watched]]:
    before = sys.stdout, sys.stderr
    out, err = _Watched(sys.stdout), _Watched(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before


def _print_error(out: _Watched, err: _Watched, code: int) -> None:
    if not code or out.is_used:
        return
    lines = [line for line in err.text.strip().splitlines() if not line.startswith("Try: ")]
    out.write(json.dumps({"error": "\n".join(lines), "exit_code": code}) + "\n")
    out.flush()
