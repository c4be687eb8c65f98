"""Which ranks hold which value of each fact of their environment, record by record."""

from __future__ import annotations

from rankscope.wire.schema import Environment

_MAX_FACTS = 4096


class EnvironmentTable:
    """`by_fact[fact][value]` is a set of ranks; a fact that is the same on all is cheap."""

    def __init__(self) -> None:
        self.records: dict[int, Environment] = {}
        self.by_fact: dict[str, dict[str, set[int]]] = {}

    def put(self, record: Environment) -> None:
        """Take a snapshot; the newest of a rank counts."""
        known = self.records.get(record.rank)
        if known is not None:
            if (record.time_ns, repr(record)) <= (known.time_ns, repr(known)):
                return
            for fact, value in known.facts.items():
                if fact in self.by_fact:
                    self._remove(fact, value, record.rank)
        self.records[record.rank] = record
        for fact, value in record.facts.items():
            if fact in self.by_fact or len(self.by_fact) < _MAX_FACTS:
                self.by_fact.setdefault(fact, {}).setdefault(value, set()).add(record.rank)

    def _remove(self, fact: str, value: str, rank: int) -> None:
        values = self.by_fact[fact]
        values[value].discard(rank)
        if not values[value]:
            del values[value]
            if not values:
                del self.by_fact[fact]

    def fact(self, rank: int, name: str) -> str:
        """Return a fact of a rank, empty where it is not known."""
        record = self.records.get(rank)
        return "" if record is None else record.facts.get(name, "")
