"""What stays of a line when everything is taken out that differs from rank to rank."""

from __future__ import annotations

import re

_NUMBERS = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|(?:\d{1,3}\.){3}\d{1,3}|/[\w.+-]+(?:/[\w.+-]+)+|\d+"
)
_QUOTED = re.compile(r"'[^']{1,200}'|\"[^\"]{1,200}\"")


def template(text: str) -> str:
    """Return a line with what varies from rank to rank taken out: numbers, addresses, paths."""
    return _NUMBERS.sub("#", _QUOTED.sub("'#'", text[:2000]))[:300].strip()
