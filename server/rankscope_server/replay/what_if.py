"""Steps that ran, run again with changes, one by one and together: what each would give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.statistics import Array
from rankscope_server.findings.text import capital, ranks_text
from rankscope_server.replay.replay import Replay

_MOST_RANKS = 16  # of which it is worked out what a step without their slowness takes
_MOST_CELLS = 2_000_000  # nodes x steps that are run again for that: a fifth of a second
_SHARED = 1.01  # from here on ranks of a host had more of its processors
_NO_MORE_PROCESSORS = (
    "the ranks of that host then work as long as before, as they share its processors again"
)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that could be otherwise, and what is assumed when it is."""

    key: str
    label: str
    assumption: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mean step with these changes together."""

    keys: tuple[str, ...]
    step_ms: float


@dataclass(frozen=True, slots=True)
class WithoutRank:
    """The mean step if this rank alone worked as its peers."""

    rank: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answers of one replay; `step_ms` is the recorded mean, `replayed_ms` what it gives back.

    `outcomes` has every set of changes, the empty one first: that is `replayed_ms`. `without` are
    the ranks with most self time beyond the usual, the most first.
    """

    step_lo: int
    step_hi: int
    num_steps: int
    step_ms: float
    replayed_ms: float
    changes: tuple[Change, ...]
    outcomes: tuple[Outcome, ...]
    without: tuple[WithoutRank, ...] = ()


def what_if(
    replay: Replay, slow: Sequence[int], slower: Mapping[int, float] | None = None
) -> WhatIf:
    """Return what changes would give; `slow` are the rows whose work a finding accuses.

    `slower` says how many times as long rows would work if these were not slow: those of their
    hosts have their processors while they are held up.
    """
    offered = [*_without(replay, slow, slower or {}), _alike(replay), _no_transfers(replay)]
    outcomes = []
    for num in range(len(offered) + 1):
        for chosen in itertools.combinations(offered, num):
            durations = replay.recorded
            for _, apply in chosen:  # in this order: what is alike knows no slow rank any more
                durations = apply(durations)
            keys = tuple(change.key for change, _ in chosen)
            outcomes.append(Outcome(keys, replay.mean_step_ms(durations)))
    return WhatIf(
        step_lo=int(replay.steps[0]), step_hi=int(replay.steps[-1]), num_steps=len(replay.steps),
        step_ms=replay.recorded_step_ms(), replayed_ms=outcomes[0].step_ms,
        changes=tuple(change for change, _ in offered), outcomes=tuple(outcomes),
        without=_without_each(replay, slow),
    )  # fmt: skip


def _without_each(replay: Replay, slow: Sequence[int]) -> tuple[WithoutRank, ...]:
    most = max(1, min(_MOST_RANKS, _MOST_CELLS // max(replay.recorded.size, 1)))
    share = min(1.0, most / max(len(replay.ranks), 1))
    rows = dict.fromkeys((*slow, *replay.slowest_ranks(share)))
    return tuple(
        WithoutRank(replay.ranks[row], replay.step_without_ms([row]))
        for row in [row for row in rows if _has_peers(replay, row, [row])][:most]
    )


_Offered = tuple[Change, Callable[[Array], Array]]


def _without(replay: Replay, slow: Sequence[int], slower: Mapping[int, float]) -> list[_Offered]:
    """Return the change that the accused work as their peers; none where they have no peers."""
    rows = [row for row in slow if _has_peers(replay, row, slow)]
    if not rows:
        return []
    who = ranks_text([replay.ranks[row] for row in rows])
    is_shared = any(factor > _SHARED for factor in slower.values())
    change = Change(
        "as-peers",
        f"{capital(who)} as fast as {'its' if len(rows) == 1 else 'their'} peers",
        "Self time is replaced, operation by operation, by the median of the other ranks of the "
        "stage in the same step; "
        + (_NO_MORE_PROCESSORS if is_shared else "all else stays as it was recorded"),
    )
    changed = replay.of_ranks([*rows, *slower])
    as_peers = replay.without_excess(rows, None, slower)
    return [(change, lambda durations: np.where(changed[:, None], as_peers, durations))]


def _alike(replay: Replay) -> _Offered:
    change = Change(
        "alike",
        "The work spread evenly",
        "Each operation takes its mean over all ranks and steps: the same work in all, no rank and "
        "no step slower than another",
    )
    work, ideal = replay.graph.rank >= 0, replay.ideal()
    return change, lambda durations: np.where(work[:, None], ideal, durations)


def _no_transfers(replay: Replay) -> _Offered:
    change = Change(
        "no-transfers",
        "Transfers that take no time",
        "Ranks still wait until the last one has called; what then goes over the network costs "
        "nothing: the most that a faster network, smaller messages or more overlap can give",
    )
    transfers = replay.graph.rank < 0
    return change, lambda durations: np.where(transfers[:, None], 0.0, durations)


def _has_peers(replay: Replay, row: int, slow: Sequence[int]) -> bool:
    others = set(np.flatnonzero(replay.stage == replay.stage[row]).tolist()) - set(slow)
    mine = replay.kind[replay.graph.rank == row]
    return any(np.array_equal(mine, replay.kind[replay.graph.rank == other]) for other in others)
