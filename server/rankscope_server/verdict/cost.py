"""What a run cost: the ledger with its waits divided by what was waited for, and what-ifs.

The ledger is measured. It holds communication and waiting as one; the steps in memory say how they
are divided: the shortest wait of any rank in a step is communication, the rest of each rank's wait
is for others, and of that straggling is by how much an accused rank came after the last of its
peers. In a pipeline what its stages wait for each other, without the transfers, is its bubble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope_server.diagnose.communication.detector import bucket_gains_of
from rankscope_server.diagnose.goodput.detector import ledger_of
from rankscope_server.diagnose.straggler.detector import near_rows
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.kinds import SLOW_KINDS
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.exchanges import exchanges_of
from rankscope_server.observe.rank_cost import change_of_work, healthy_columns
from rankscope_server.replay.recorded_program import NoReplay
from rankscope_server.replay.what_if import WhatIf, what_if

_DIVIDING_STEPS = 64  # of which it is known what each wait was for
MAX_STEPS = 2_048  # of an attempt, the newest, that divide its waits
PARTS: tuple[str, ...] = (
    "productive", "straggling", "bubble", "waiting", "communication", "communication or waiting",
    "data", "evaluation", "checkpoint", "start-up", "first steps", "restart", "lost work",
    "stuck or failing", "after the end", "unknown",
)  # fmt: skip
_TOGETHER = "communication and waiting"  # in the ledger
_RENAMED = {"not recorded": "unknown"}
_Mask = NDArray[np.bool_]
_Matrix = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of all ranks together by part; they add up to `wall_seconds`."""

    parts: dict[str, float]
    wall_seconds: float
    num_ranks: int
    num_attempts: int
    lost_steps: int
    ettr: float  # share of the time in steps that are kept
    num_divided: int  # steps of all attempts by which waits were divided; 0: not divided
    slow_ranks: tuple[int, ...]  # that straggling is about, of all attempts
    what_if: WhatIf | None
    no_what_if: str  # why there is none
    buckets: tuple[Bucket, ...] = ()  # of a DDP run


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a replay says of another bucket: throughput over that of now, within a band."""

    bucket_mib: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Waits:
    """How the waits of an attempt are divided, ms of all ranks in the steps looked at."""

    communication: float
    straggling: float
    others: float
    num_steps: int
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Return all waits."""
        return self.communication + self.straggling + self.others + self.bubble


@dataclass(frozen=True, slots=True)
class _Accused:
    """A rank that a finding accuses of being slow in some steps."""

    rank: int
    first_step: int
    last_step: int


def cost_of(window: Window) -> Cost | None:
    """Return what a run cost up to now; None before its first step, and of a recording."""
    ledger = None if window.facts.is_recording else ledger_of(window)
    if ledger is None:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    for name, seconds in ledger.parts.items():
        if name != _TOGETHER:
            parts[_RENAMED.get(name, name)] += seconds
    windows = (*window.past, window)
    accused = [_accused(one) for one in windows]
    divided = [waits_of(one, slow) for one, slow in zip(windows, accused, strict=True)]
    for name, share in _shares(windows, divided).items():
        parts[name] += share * ledger.parts[_TOGETHER]
    found, buckets, reason = _what_if(window, accused[-1])
    return Cost(
        parts=parts, wall_seconds=ledger.wall_seconds, num_ranks=ledger.num_ranks,
        num_attempts=ledger.num_attempts, lost_steps=ledger.lost_steps, ettr=ledger.ettr,
        num_divided=sum(waits.num_steps for waits in divided if waits is not None),
        slow_ranks=tuple(sorted({one.rank for slow in accused for one in slow})),
        what_if=found, no_what_if=reason, buckets=buckets,
    )  # fmt: skip


def waits_of(window: Window, accused: Sequence[_Accused]) -> Waits | None:
    """Return how the waits of an attempt are divided; None where no step shows any."""
    table = window.steps
    first = max(0, table.num_steps - MAX_STEPS)
    blocked = table.get("blocked", first)
    unseen = np.isnan(table.get("own", first))
    if unseen.any():
        blocked = np.where(unseen, np.nan, blocked)
    total = float(np.nansum(blocked, dtype=np.float64))
    if not total:
        return None
    ranks = table.ranks
    roles = [window.ranks[rank].stage if rank in window.ranks else -1 for rank in ranks]
    counts = Counter(roles)
    has_peers = np.array([counts[role] > 1 for role in roles])
    is_known = ~np.isnan(blocked)
    # the shortest block of a step is that of all its ranks that have peers
    num_sharing = is_known.sum(axis=0) if has_peers.all() else is_known[has_peers].sum(axis=0)
    shortest = np.nan_to_num(np.fmin.reduce(blocked, axis=0)).astype(np.float64)
    communication = float(num_sharing @ shortest)
    slow = _slow_cells(table.steps[first:], ranks, accused)
    straggling = 0.0
    if slow.any():
        waited = np.maximum(blocked - np.where(has_peers[:, None], shortest, 0.0), 0.0)
        straggling = float(np.nansum(np.minimum(waited, _lateness(blocked, roles, slow))))
    found = Waits(
        communication=communication,
        straggling=straggling,
        others=max(total - communication - straggling, 0.0),
        num_steps=int(is_known.any(axis=0).sum()),
    )
    return found if max(roles, default=-1) < 1 else _with_bubble(window, found)


def _with_bubble(window: Window, found: Waits) -> Waits:
    """Return the waits of a pipeline, with what its stages wait for each other taken out.

    The newest steps whose exchanges are in memory say which share of all waits that is, and which
    share of all waits are transfers between stages.
    """
    table, events = window.steps, window.replays.events
    usual = np.flatnonzero(usual_steps(table, window.policy) & ~table.thinned())[-_DIVIDING_STEPS:]
    blocked = float(np.nansum(table.get("blocked")[:, usual]))
    rows = events.select(table.steps[usual])
    between = exchanges_of(rows, events.words("operation"))
    waited = float(between.blocked_ms.sum())
    if not blocked or not waited:
        return found
    transfers = float(np.nansum(np.fmin(between.transfers_ms(), between.blocked_ms)))
    pool, total = found.communication + found.others, found.total
    bubble = min(pool, (waited - transfers) / blocked * total)
    collectives = min(found.communication, max(0.0, 1.0 - waited / blocked) * total)
    communication = min(pool - bubble, transfers / blocked * total + collectives)
    return replace(
        found, bubble=bubble, communication=communication, others=pool - bubble - communication
    )


def _accused(window: Window) -> list[_Accused]:
    """Return the ranks that findings of this attempt call slow, and in which steps."""
    return [
        _Accused(rank, finding.onset_step or 0, finding.ended_step or 1 << 62)
        for finding in window.before.values()
        if finding.kind in SLOW_KINDS and finding.cost_throughput_ratio
        for rank in finding.ranks
    ]


def _slow_cells(steps: _Matrix, ranks: Sequence[int], accused: Sequence[_Accused]) -> _Mask:
    found = np.zeros((len(ranks), len(steps)), bool)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    for one in accused:
        if one.rank in row_of:
            found[row_of[one.rank]] |= (steps >= one.first_step) & (steps <= one.last_step)
    return found


def _lateness(blocked: _Matrix, roles: Sequence[int], slow: _Mask) -> _Matrix:
    """Return for each cell by how much the accused came after the last healthy rank, ms.

    Who comes later waits less. Ranks are compared with those of their own role: others wait
    longer or shorter by the schedule. An accused rank waits for none of its own kind.
    """
    late = np.zeros(blocked.shape[1])
    for role in set(roles):
        rows = np.array([one == role for one in roles])
        healthy = np.fmin.reduce(np.where(slow[rows], np.nan, blocked[rows]), axis=0)
        accused = np.fmin.reduce(np.where(slow[rows], blocked[rows], np.nan), axis=0)
        late = np.fmax(late, healthy - accused)
    return np.where(slow, 0.0, np.maximum(late, 0.0))


def _shares(windows: Sequence[Window], divided: Sequence[Waits | None]) -> dict[str, float]:
    """Return how all waits of a run are divided: by attempt, each counts as much as it waited."""
    found = dict.fromkeys(
        ("straggling", "bubble", "waiting", "communication", "communication or waiting"), 0.0
    )
    weights = [
        float(sum(sums.parts["blocked"] for sums in window.facts.sums.by_rank.values()))
        for window in windows
    ]
    total = sum(weights)
    if not total:
        return found | {"communication or waiting": 1.0}
    for weight, waits in zip(weights, divided, strict=True):
        if waits is None or not waits.total:
            found["communication or waiting"] += weight / total
            continue
        for name, value in (
            ("straggling", waits.straggling), ("bubble", waits.bubble),
            ("waiting", waits.others), ("communication", waits.communication),
        ):  # fmt: skip
            found[name] += weight / total * value / waits.total
    return found


def _what_if(
    window: Window, accused: Sequence[_Accused]
) -> tuple[WhatIf | None, tuple[Bucket, ...], str]:
    try:
        replay, programs = window.replays.newest(
            window.steps, window.ranks, window.groups, window.policy
        )
    except NoReplay as error:
        return None, (), str(error)
    newest = int(replay.steps[-1])
    active = [one for one in accused if one.first_step <= newest <= one.last_step]
    ranks = {one.rank for one in active}
    rows = [row for row, rank in enumerate(replay.ranks) if rank in ranks]
    slower = _slower(window, active) if active else {}
    row_of = {rank: row for row, rank in enumerate(replay.ranks)}
    found = what_if(replay, rows, {row_of[rank]: slower[rank] for rank in slower if rank in row_of})
    gains = bucket_gains_of(window, replay, programs)
    return found, tuple(Bucket(float(mib), *gain) for mib, gain in gains.items()), ""


def _slower(window: Window, accused: Sequence[_Accused]) -> dict[int, float]:
    """Return how many times as long ranks would work without those that are slow, as the findings.

    Ranks of the same host that became faster meanwhile have the processors of one that is held up.
    """
    table, policy = window.steps, window.policy
    rows = [table.row_of[rank] for rank in {one.rank for one in accused} if rank in table.row_of]
    near = near_rows(window, rows)
    start = int(np.searchsorted(table.steps, min(one.first_step for one in accused)))
    calm = ~table.special() & table.seen()
    healthy = healthy_columns(calm, start, 0, policy)
    inside = np.flatnonzero(calm[start:])[-policy.cost_steps :] + start
    if not near or len(healthy) < policy.healthy_min_steps or not len(inside):
        return {}
    change = min(1.0, change_of_work(table, near, healthy, inside))
    change = max(change, len(near) / (len(near) + len(rows)))
    return {table.ranks[row]: 1.0 / change for row in (*rows, *near)}
