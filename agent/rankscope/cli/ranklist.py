"""Ranks as people write them: "0,3-5"."""

from __future__ import annotations

import re

_MOST = 1 << 20
_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


def read_ranks(text: str) -> list[int]:
    """Return the ranks in order, none for an empty text. Raises ValueError with the reason."""
    ranks: set[int] = set()
    for part in (part.strip() for part in text.split(",") if text.strip()):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"--ranks: {part!r} is no rank; write 0,3-5")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high or high > _MOST:
            raise ValueError(f"--ranks: {part!r} is no range of ranks")
        ranks.update(range(low, high + 1))
    return sorted(ranks)
