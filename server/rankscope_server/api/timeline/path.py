"""The critical path: from the end of a step back to its begin, by those that were waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rankscope_server.api.timeline.calls import Matched
from rankscope_server.api.timeline.reading import Recorded
from rankscope_server.findings.text import ms_text, percent_text
from rankscope_server.text import rank_list

Array = np.ndarray[Any, np.dtype[Any]]
_MAX_PARTS = 2_000
_LOOSE_SHARE = 0.05  # of a step: a rank that was blocked longer for no known call did not work
_SHOWN = 3  # ranks that the sentence names


class Stretch(NamedTuple):
    """A rank works, or an operation is under way for which it was the last to come."""

    rank: int
    begin_ns: int
    end_ns: int
    call: int  # a place in the calls; -1 it works
    is_sure: bool


@dataclass(frozen=True, slots=True)
class Path:
    """Stretches in order of time; `is_whole`: back to the begin of the step."""

    stretches: list[Stretch]
    is_whole: bool


def critical_path(recorded: Recorded, matched: Matched) -> Path:
    """Return what the end of the step rests on.

    From the rank that ended last back to its latest wait, from there to the one it waited for.
    """
    started = recorded.started_ns
    known = (started > 0) & ~np.isnan(recorded.cells["step"])
    if not known.any():
        return Path([], False)
    length = np.round(np.nan_to_num(recorded.cells["step"]) * 1e6).astype(np.int64)
    ended = np.where(known, started + length, 0)
    rank, at = int(np.argmax(ended)), int(ended.max())
    calls = matched.calls
    ends = matched.ended_ns
    # A long wait of which it is not known for whom is where the path is lost.
    is_lost = ~matched.is_split & (calls.waited_ns > _LOOSE_SHARE * length[calls.rank])
    waited = (matched.blocker >= 0) | is_lost
    is_located = _is_located(recorded, matched)
    found: list[Stretch] = []
    while len(found) < _MAX_PARTS:
        low, high = np.searchsorted(calls.rank, (rank, rank + 1)).tolist()
        mine = np.arange(low, high)
        mine = mine[waited[low:high] & (ends[low:high] <= at) & (ends[low:high] > started[rank])]
        if not len(mine):
            if not is_located[rank]:
                return Path(found[::-1], False)
            found.append(Stretch(rank, min(int(started[rank]), at), at, -1, True))
            return Path(found[::-1], True)
        call = int(mine[np.argmax(ends[mine])])
        if is_lost[call]:
            found.append(Stretch(rank, int(ends[call]), at, -1, True))
            return Path(found[::-1], False)
        operation = int(matched.of[call])
        blocker = int(matched.blocker[call])
        theirs = matched.calls_of(operation)
        theirs = theirs[calls.rank[theirs] == blocker]
        came = int(matched.arrived_ns[theirs].min())
        end = int(ends[call])
        is_sure = bool(matched.late_ns[operation] > matched.sure_ns[operation])
        is_sure &= _is_ordered(recorded, rank, blocker, int(matched.idle_ns[call]))
        if end < at:
            found.append(Stretch(rank, end, at, -1, True))
        came = min(came, end)
        found.append(Stretch(blocker, came, end, call, is_sure))
        if came >= at or not known[blocker] or came <= started[blocker]:
            return Path(found[::-1], bool(known[blocker]) and came < at)
        rank, at = blocker, came
    return Path(found[::-1], False)


def _is_located(recorded: Recorded, matched: Matched) -> Array:
    """Return of which ranks nearly all of the blocked time is that of calls: the rest is work."""
    cells, calls = recorded.cells, matched.calls
    waits = np.bincount(calls.rank, calls.waited_ns, recorded.height) / 1e6
    known: Array = cells["blocked"] - waits <= _LOOSE_SHARE * cells["step"]
    return known  # false where either is NaN


def _is_ordered(recorded: Recorded, rank: int, other: int, idle_ns: int) -> bool:
    """Return whether clocks allow to say that a rank waited for the other."""
    if recorded.places[rank].host == recorded.places[other].host:
        return True
    band = recorded.clocks.band_ns[[rank, other]].sum()
    return bool(idle_ns > band)  # false where the band is not known


def shares_of(path: Path) -> dict[int, int]:
    """Return for how long each rank works on the path, ns, the most first."""
    total: dict[int, int] = defaultdict(int)
    for one in path.stretches:
        if one.call < 0:
            total[one.rank] += one.end_ns - one.begin_ns
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def path_text(path: Path) -> str:
    """Return the critical path in words."""
    if not path.stretches:
        return "The critical path is not known."
    span = path.stretches[-1].end_ns - path.stretches[0].begin_ns
    if span <= 0:
        return "The critical path is not known."
    shares = shares_of(path)
    most = [rank for rank, ns in shares.items() if ns >= 0.05 * span][:_SHOWN]
    moved = sum(one.end_ns - one.begin_ns for one in path.stretches if one.call >= 0)
    parts = [f"{percent_text(shares[rank] / span)} on rank {rank} ({ms_text(shares[rank] / 1e6)})"
             for rank in most]  # fmt: skip
    rest = [rank for rank in shares if rank not in most]
    if rest and sum(shares[rank] for rank in rest) >= 0.01 * span:
        total = sum(shares[rank] for rank in rest)
        parts.append(f"{percent_text(total / span)} on {rank_list(sorted(rest), 4)}")
    if moved >= 0.005 * span:
        parts.append(f"{percent_text(moved / span)} in operations under way")
    text = f"The critical path takes {ms_text(span / 1e6)}: {', '.join(parts)}."
    unsure = sum(not one.is_sure for one in path.stretches)
    if unsure:
        text += (
            f" At {unsure} of its {sum(one.call >= 0 for one in path.stretches)} turns who came "
            "last is within how exact the times are."
        )
    return text if path.is_whole else f"{text} Before that it is not known."
