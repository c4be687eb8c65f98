"""Where each rank is by now, whatever the order in which its states come."""

from __future__ import annotations

from typing import TypeVar

from rankscope.wire.schema import RankRegistered, RankState, Stacks

_Kept = TypeVar("_Kept", RankRegistered, RankState, Stacks)


class LatestStates:
    """Of each rank the state of the latest time or, beyond a clock that was set back, the one that
    came furthest: until that clock shows the old time again all that comes looks old."""

    def __init__(self) -> None:
        self.by_rank: dict[int, RankState] = {}
        self._newest: dict[int, RankState] = {}  # on the clock of the rank's host
        self._furthest: dict[int, RankState] = {}  # by steps
        self._began_again: set[int] = set()

    def take(self, state: RankState) -> None:
        """Take one state."""
        keep_newest(self._newest, state)
        known = self._furthest.get(state.rank)
        if known is None or _is_further(state, known):
            self._furthest[state.rank] = state
        self._choose(state.rank)

    def begin_again(self, rank: int) -> None:
        """Take note that another process is this rank now: it counts its steps anew."""
        self._began_again.add(rank)
        self._choose(rank)

    def _choose(self, rank: int) -> None:
        if rank not in self._newest:
            return
        newest, furthest = self._newest[rank], self._furthest[rank]
        is_set_back = rank not in self._began_again and _is_beyond(furthest, newest)
        self.by_rank[rank] = furthest if is_set_back else newest


def keep_newest(known: dict[int, _Kept], record: _Kept) -> None:
    """Put a record in place of that of its rank if it is newer."""
    before = known.get(record.rank)
    if before is None or record.time_ns > before.time_ns:
        known[record.rank] = record
    elif record.time_ns == before.time_ns and repr(record) > repr(before):
        known[record.rank] = record  # of two at once the same one wins in every order


def _is_further(state: RankState, known: RankState) -> bool:
    place, before = (state.step, state.time_ns), (known.step, known.time_ns)
    return place > before or (place == before and repr(state) > repr(known))


def _is_beyond(state: RankState, other: RankState) -> bool:
    """Return whether a rank came from `other` to `state`, in steps and in collectives.

    A script may number its steps anew; it comes to more collectives all the same.
    """
    if state.step <= other.step:
        return False
    issued = {group.group: group.issued for group in other.groups}
    more = [group.issued - issued[group.group] for group in state.groups if group.group in issued]
    return bool(more) and min(more) >= 0 and max(more) > 0
