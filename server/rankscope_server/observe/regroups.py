"""The groups of a job that trains on without ranks that it lost: who was in each, since when."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.wire.schema import Event

_MAX_EPOCHS = 256  # the newest; of more the oldest are let go
_MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """One group, as its first member announced it."""

    epoch: int
    time_ns: int
    step: int  # that this member was in
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Regroups:
    """The groups by their number, whichever order their members' events come in."""

    by_epoch: dict[int, Regroup] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Take what one member announced."""
        said = event.fields
        words = said.get("ranks", "").split(",")[:_MAX_RANKS]
        if not said.get("epoch", "").isdecimal() or not all(word.isdecimal() for word in words):
            return
        epoch = min(int(said["epoch"]), 1 << 53)
        found = Regroup(
            epoch=epoch, time_ns=event.time_ns, step=event.step, ranks=tuple(map(int, words))
        )
        known = self.by_epoch.get(epoch)
        if known is None or (found.time_ns, found.ranks) < (known.time_ns, known.ranks):
            self.by_epoch[epoch] = found
        if len(self.by_epoch) > _MAX_EPOCHS:
            del self.by_epoch[min(self.by_epoch)]

    @property
    def in_order(self) -> list[Regroup]:
        """The groups, the first one first."""
        return [self.by_epoch[epoch] for epoch in sorted(self.by_epoch)]

    def are_without(self, rank: int) -> bool:
        """Return whether the newest group trains without this rank."""
        return bool(self.by_epoch) and rank not in self.by_epoch[max(self.by_epoch)].ranks
