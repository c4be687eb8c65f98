"""How much work ranks say they were given: tokens of each step, where batches have some."""

from __future__ import annotations

_KEPT = 2048  # newest steps of a rank: 100 bytes each


class DeclaredWork:
    """Tokens by rank and step. Words may come in any order and any number of times."""

    def __init__(self) -> None:
        self._tokens: dict[int, dict[int, float]] = {}

    def add(self, rank: int, step: int, tokens: float) -> None:
        """Take what a rank says of one step."""
        known = self._tokens.setdefault(rank, {})
        known[step] = tokens
        if len(known) > _KEPT:
            for old in sorted(known)[: _KEPT // 2]:
                del known[old]

    def mean(self, rank: int, first_step: int, last_step: int) -> float | None:
        """Return the mean tokens of a rank in some steps, None where too few are known."""
        found = [
            tokens
            for step, tokens in self._tokens.get(rank, {}).items()
            if first_step <= step <= last_step
        ]
        return sum(found) / len(found) if len(found) >= 5 else None
