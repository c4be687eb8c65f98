"""The events of a trace of Chrome's viewer, read one by one: its size costs time, not memory."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TextIO

READ_CHARACTERS = 4 << 20
_MAX_EVENT = 32 << 20
_BETWEEN = re.compile(r"[\s,]*")
_decode = json.JSONDecoder().raw_decode


class TraceError(ValueError):
    """The file is no trace, or a damaged one; the message says what to do."""


def events_of(
    text: TextIO, buffer: str, at: int, *, may_be_cut: bool = False
) -> Generator[dict[str, Any], None, str]:
    """Yield the events of an array of which `buffer` has the first ones, from `at` on.

    Returns what was read behind the array. Where the array ends before its bracket that is an
    error, unless it may be cut: then the last event, if it is a part of one, is left out. Raises
    TraceError.
    """
    while True:
        between = _BETWEEN.match(buffer, at)
        at = between.end() if between else at
        if buffer[at : at + 1] == "]":
            return buffer[at + 1 :]
        try:
            event, at = _decode(buffer, at)
        except ValueError as error:
            more = text.read(READ_CHARACTERS)
            if not more:
                if may_be_cut:
                    return ""
                raise TraceError("is cut short; the rank ended while it wrote: export it again"
                                 ) from error  # fmt: skip
            if len(buffer) - at > _MAX_EVENT:
                raise TraceError(f"an event is no JSON: {error}; export it again") from error
            buffer, at = buffer[at:] + more, 0
            continue
        if isinstance(event, dict):
            yield event
