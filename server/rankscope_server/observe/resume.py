"""From which step a run went on after a restart, and so which steps of before were in vain.

The agent counts the steps of each start from 1, unless the script says where it is
(`rankscope.set_step`). What gives the place, the surest first:

1. The script's own step numbers, where it gives any (`rankscope.log_metrics`): by how much they are
   ahead of the agent's count, in both starts.
2. Counts that do not begin at 1 again.
3. The newest whole checkpoint of the start before: the run continues behind it.
4. None of these: no checkpoint was seen, so the run began anew.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope.wire.schema import Metrics

_NEWEST = 8  # numbers of the script that are kept
_ENOUGH = 3  # of them that agree: an epoch given in place of a step is ahead differently each time


class ScriptSteps:
    """The newest step numbers that a script gave, beside the agent's count at that moment."""

    def __init__(self) -> None:
        self._newest: list[tuple[int, int, int]] = []  # time, rank, by how much ahead

    def take(self, record: Metrics) -> None:
        """Take one record; the agent's own numbers say nothing."""
        entry = (record.time_ns, record.rank, record.step - record.counted_step)
        if not record.counted_step or entry in self._newest:
            return
        bisect.insort(self._newest, entry)
        del self._newest[:-_NEWEST]

    @property
    def ahead(self) -> int | None:
        """Return by how much the script's numbers are ahead; None where it is not known."""
        found = Counter(ahead for _, _, ahead in self._newest).most_common(1)
        return found[0][0] if found and found[0][1] >= _ENOUGH else None


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of a run did. Steps as the agent counted them."""

    first_step: int
    last_step: int
    ahead: int | None = None  # of `ScriptSteps`
    saved_step: int = 0  # the last one that a whole checkpoint holds, 0 without any


def last_whole_save(saves: Iterable[tuple[int, int]]) -> int:
    """Return the last step that a checkpoint holds which is whole, 0 without any.

    `saves` are pairs of a rank and the step in which it saved. A save comes after the update of the
    step before: that is the last one it holds. Whole are those that as many ranks wrote as any.
    """
    by_step: dict[int, set[int]] = {}
    for rank, step in saves:
        by_step.setdefault(step, set()).add(rank)
    whole = max((len(ranks) for ranks in by_step.values()), default=0)
    return max((step - 1 for step, ranks in by_step.items() if len(ranks) == whole), default=0)


def first_done_again(start: Start, later: Sequence[Start]) -> int | None:
    """Return from which step of a start on a later one trained again; None for the newest start.

    One whose numbers do not show it went back to this start where none between them saved.
    """
    if not later:
        return None
    first = min(
        _went_on(start, other)
        for at, other in enumerate(later)
        if _shows(start, other) or not any(between.saved_step for between in later[:at])
    )
    return first if first <= start.last_step else None


def _shows(start: Start, other: Start) -> bool:
    return (start.ahead is not None and other.ahead is not None) or other.first_step > 1


def _went_on(start: Start, other: Start) -> int:
    """Return the first step of another start in the numbers of this one."""
    if start.ahead is not None and other.ahead is not None:
        return other.first_step + other.ahead - start.ahead
    if other.first_step > 1:
        return other.first_step
    return start.saved_step + 1 if start.saved_step else start.first_step
