"""Passes over the data loaders of each rank: their first batches as checksums, and the sampler."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.wire.schema import Event

PASS = "data pass"  # an event
MAX_PASSES = 64  # of one rank


@dataclass(frozen=True, slots=True, order=True)
class DataPass:
    """How one pass of one rank over one loader began."""

    time_ns: int
    step: int
    batches: tuple[str, ...]  # checksums of the first ones, empty where a batch holds no number
    group: str  # names the ranks that share a model's data; empty where not known
    sampler: str  # class
    shuffles: bool  # by its epoch
    epoch: str  # of the sampler; empty where it has none

    @property
    def group_size(self) -> int:
        """Return how many ranks share the data, 0 where it is not known."""
        size = self.group.partition(" ")[0]
        return int(size) if size.isdecimal() else 0

    @property
    def is_distinct(self) -> bool:
        """Return whether its batches are known, several, and unlike each other."""
        return len(self.batches) > 1 and all(self.batches) and (
            len(set(self.batches)) == len(self.batches)
        )  # fmt: skip


class DataPasses:
    """Passes by (loader, number), each by rank; `take` events in any order, twice."""

    def __init__(self) -> None:
        self.by_loader: dict[int, dict[int, dict[int, DataPass]]] = {}  # loader, number, rank
        self._counts: dict[int, int] = {}

    def take(self, event: Event) -> None:
        """Take one pass of one rank."""
        said = event.fields
        numbers = said.get("loader", ""), said.get("pass", "")
        if not all(number.isdecimal() and len(number) < 4 for number in numbers):
            return
        loader, number = map(int, numbers)
        known = self.by_loader.get(loader, {}).get(number, {}).get(event.rank)
        if known is None:
            count = self._counts[event.rank] = self._counts.get(event.rank, 0) + 1
            if count > MAX_PASSES:
                return
        found = DataPass(
            event.time_ns, event.step, tuple(said.get("batches", "").split(" ")[:16]),
            said.get("group", ""), said.get("sampler", ""), said.get("shuffles") == "True",
            said.get("epoch", ""),
        )  # fmt: skip
        ranks = self.by_loader.setdefault(loader, {}).setdefault(number, {})
        ranks[event.rank] = found if known is None else min(found, known)
