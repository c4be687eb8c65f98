"""The ledger of what this agent lost: totals by rank, source and reason, sent when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rankscope.node.offsets import LossTotal
from rankscope.wire import schema

Key = tuple[int, int, str, str]  # attempt, rank, source, reason


class Ledger:
    """Totals since the producer began; it continues over restarts with the offsets."""

    def __init__(
        self, totals: Iterable[LossTotal] = (), wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._totals: dict[Key, int] = {
            (total.attempt, total.rank, total.source, total.reason): total.count for total in totals
        }
        self._changed: set[Key] = set()
        self._wall_ns = wall_ns

    def add(
        self, source: str, reason: str, count: int, *, attempt: int = 0, rank: int = -1
    ) -> None:
        """Count something lost."""
        if count > 0:
            key = (attempt, rank, source, reason[:200])
            self._totals[key] = self._totals.get(key, 0) + count
            self._changed.add(key)

    def say_all_again(self) -> None:
        """Send every total once more: a batch that named some of them was dropped itself."""
        self._changed.update(self._totals)

    def has_news(self) -> bool:
        """Return whether a total changed since the last call of `take_records`."""
        return bool(self._changed)

    def take_records(self) -> list[schema.Loss]:
        """Return the totals that changed since the last call."""
        now = self._wall_ns()
        records = [
            schema.Loss(
                attempt=attempt, rank=rank, time_ns=now, source=source, reason=reason,
                count=self._totals[attempt, rank, source, reason],
            )
            for attempt, rank, source, reason in sorted(self._changed)
        ]  # fmt: skip
        self._changed.clear()
        return records

    def totals(self) -> list[LossTotal]:
        """Return all totals, to be kept with the offsets."""
        return [LossTotal(*key, count) for key, count in self._totals.items()]
