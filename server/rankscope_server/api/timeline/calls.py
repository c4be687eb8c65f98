"""Operations of one step on all ranks: which belong together, who came last, who waited for whom.

No rank ends a collective before the last one has begun it, so the member that took the least time
from its call to the end came last, and what the others took longer was waiting: no two clocks are
compared. Of a send and its receive, and of operations with a root, only one side waits for the
other; there the calls are compared on the aligned clock.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.schema import ENDED, FLAG_END_IS_UPPER_BOUND, P2P_OPERATIONS

Array = np.ndarray[Any, np.dtype[Any]]
NUMBERS = (
    "arrived_ns", "started_ns", "duration_ns", "device_duration_ns", "returned_ns", "blocked_ns",
    "sequence", "size_bytes", "peer_rank", "state", "flags", "step",
)  # fmt: skip
MIN_WAIT_NS = 10_000  # a wait shorter than this is the call itself
# Ends are exact to the microsecond, or those of callbacks that run up to a few ms later.
SURE_NS, SURE_OF_CALLBACK_NS = 200_000, 3_000_000
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_TO_ROOT = frozenset({"reduce", "gather", "gather_into_tensor"})
_SENDS = frozenset({"send"})
_NEVER = np.iinfo(np.int64).max
# Odd factors, other ones in each process: no sender can make two operations fall together.
_FACTORS = np.array([secrets.randbits(63) | 1 for _ in range(6)], np.int64)


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of ranks, arrays of one length; `group` and `operation` are places in their words."""

    rank: Array
    group: Array
    operation: Array
    numbers: dict[str, Array]  # by the names of `NUMBERS`
    groups: list[str]
    operations: list[str]

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, name: str) -> Array:
        return self.numbers[name]

    def where(self, chosen: Array) -> Calls:
        """Return some of the calls."""
        numbers = {name: column[chosen] for name, column in self.numbers.items()}
        return Calls(
            self.rank[chosen], self.group[chosen], self.operation[chosen], numbers, self.groups,
            self.operations,
        )  # fmt: skip

    def is_one_of(self, words: frozenset[str]) -> Array:
        """Return which calls are of these operations."""
        return np.array([word in words for word in self.operations], bool)[self.operation]

    @property
    def took_ns(self) -> Array:
        """Return from each call to its end; where that is not known, to its return."""
        took = self["duration_ns"]
        return np.maximum(np.where(took >= 0, took, self["returned_ns"]), 0)

    @property
    def waited_ns(self) -> Array:
        """Return for how long each call held its thread up."""
        blocked = self["blocked_ns"]
        return np.where(blocked > MIN_WAIT_NS, np.minimum(blocked, self.took_ns), 0)


def no_calls() -> Calls:
    """Return calls of which there are none."""
    none = np.zeros(0, np.int64)
    return Calls(none, none, none, dict.fromkeys(NUMBERS, none), [], [])


@dataclass(slots=True)
class Matched:
    """Which calls are one operation. Arrays are by call, or by operation (`first` and below)."""

    calls: Calls
    arrived_ns: Array  # on the one clock
    of: Array  # the operation of each call
    idle_ns: Array  # part of the blocked time in which the rank waited for another to come
    blocker: Array  # the rank that it waited for, -1 none or not known
    is_split: Array  # whether waiting is known from transfer
    first: Array  # a call of each operation
    num_recorded: Array
    num_members: Array  # -1 not known
    last_rank: Array  # -1 not known
    late_ns: Array  # the last came so long after the one before it
    skew_ns: Array  # and after the first
    transfer_ns: Array  # -1 not known
    sure_ns: Array  # what lateness is beyond how exact ends are
    members: dict[int, Array] = field(default_factory=dict)

    @property
    def ended_ns(self) -> Array:
        """Return when each call ended, on the one clock."""
        ended: Array = self.arrived_ns + self.calls.took_ns
        return ended

    def calls_of(self, operation: int) -> Array:
        """Return the calls of one operation."""
        if not self.members:
            order = np.argsort(self.of, kind="stable")
            parts = np.split(order, np.cumsum(np.bincount(self.of))[:-1])
            self.members.update(enumerate(parts))
        return self.members[operation]


def match(calls: Calls, ahead_ns: Array, sizes: dict[str, int]) -> Matched:
    """Return which calls belong together.

    `ahead_ns` says by rank how far its clock is ahead of the one clock, 0 where that is not known;
    `sizes` how many ranks each group has.
    """
    arrived = calls["arrived_ns"] - np.round(ahead_ns[calls.rank]).astype(np.int64)
    of, first = operations_of(calls)
    count = len(first)
    num_members = np.array([sizes.get(word, -1) for word in calls.groups], np.int64)
    num_members = num_members[calls.group[first]] if count else np.zeros(0, np.int64)
    is_p2p = calls.is_one_of(P2P_OPERATIONS)
    num_members[is_p2p[first]] = 2
    nothing, unknown = np.zeros(len(calls), np.int64), np.full(count, -1, np.int64)
    matched = Matched(
        calls=calls, arrived_ns=arrived, of=of, idle_ns=nothing.copy(), blocker=nothing - 1,
        is_split=np.zeros(len(calls), bool), first=first,
        num_recorded=np.bincount(of, minlength=count), num_members=num_members,
        last_rank=unknown.copy(), late_ns=unknown.copy(), skew_ns=unknown.copy(),
        transfer_ns=unknown.copy(), sure_ns=np.full(count, SURE_NS),
    )  # fmt: skip
    if not count:
        return matched
    is_rooted = calls.is_one_of(_FROM_ROOT | _TO_ROOT)
    _meet(matched, ~(is_p2p | is_rooted)[first])
    _one_sided(matched, is_p2p, is_rooted)
    return matched


def operations_of(calls: Calls) -> tuple[Array, Array]:
    """Return the operation that each call is of, and a call of each operation.

    By group and sequence; of an exchange also by sender and receiver. What has no number is the
    n-th of its rank, group and operation.
    """
    is_p2p = calls.is_one_of(P2P_OPERATIONS)
    is_send = calls.is_one_of(_SENDS)
    peer = np.where(calls["peer_rank"] >= 0, calls["peer_rank"], -2 - calls.rank)
    source = np.where(is_p2p, np.where(is_send, calls.rank, peer), -1)
    target = np.where(is_p2p, np.where(is_send, peer, calls.rank), -1)
    number = calls["sequence"].copy()
    kind = np.full(len(calls), -1, np.int64)
    bare = np.flatnonzero(number <= 0)
    if len(bare):
        kind[bare] = calls.operation[bare]
        keys = np.stack([calls.rank[bare], calls.group[bare], calls.operation[bare], source[bare]])
        number[bare] = _turns(keys, calls["arrived_ns"][bare])
    keys = np.stack([calls["step"], calls.group, kind, source, target, number], axis=1)
    _, first, of = np.unique(keys @ _FACTORS, return_index=True, return_inverse=True)
    return of.reshape(-1), first


def _turns(keys: Array, times: Array) -> Array:
    """Return the place of each event among those of its key, by time."""
    order = np.lexsort((times, *keys))
    is_new = np.any(np.diff(keys[:, order], axis=1, prepend=-9) != 0, axis=0)
    begins = np.flatnonzero(is_new)
    turns = np.empty(len(order), np.int64)
    turns[order] = np.arange(len(order)) - np.repeat(begins, np.diff([*begins, len(order)]))
    return turns


def _meet(matched: Matched, is_meeting: Array) -> None:
    """Say of operations that all members wait for who came last."""
    calls = matched.calls
    chosen = np.flatnonzero(
        is_meeting[matched.of] & (calls["state"] == ENDED) & (calls["duration_ns"] >= 0)
    )
    if not len(chosen):
        return
    duration = calls["duration_ns"][chosen]
    order = np.lexsort((duration, matched.of[chosen]))
    chosen, duration, of = chosen[order], duration[order], matched.of[chosen][order]
    begins = np.flatnonzero(np.diff(of, prepend=-1))
    counts = np.diff([*begins, len(of)])
    which = of[begins]
    late = (calls["flags"][chosen] & FLAG_END_IS_UPPER_BOUND) != 0
    matched.sure_ns[which[np.maximum.reduceat(late, begins)]] = SURE_OF_CALLBACK_NS
    matched.transfer_ns[which] = duration[begins]
    ends = begins + counts - 1
    matched.skew_ns[which] = duration[ends] - duration[begins]
    several = counts > 1
    matched.late_ns[which[several]] = (duration[begins + 1 - (~several)] - duration[begins])[
        several
    ]
    members = matched.num_members[which]
    is_whole = (counts >= members) & (counts == matched.num_recorded[which])
    matched.last_rank[which[is_whole]] = calls.rank[chosen[begins]][is_whole]
    # Of all that waited: longer than the last to come, by so much.
    whole = is_whole[np.repeat(np.arange(len(begins)), counts)]
    more = np.minimum(duration - np.repeat(duration[begins], counts), calls.waited_ns[chosen])
    matched.is_split[chosen[whole]] = True
    matched.idle_ns[chosen[whole]] = more[whole]
    last = np.repeat(calls.rank[chosen[begins]], counts)
    matched.blocker[chosen] = np.where(whole & (more > 0), last, -1)


def _one_sided(matched: Matched, is_p2p: Array, is_rooted: Array) -> None:
    """Say of exchanges, and of operations with a root, who waited until another had come."""
    calls, arrived = matched.calls, matched.arrived_ns
    chosen = np.flatnonzero(is_p2p | is_rooted)
    if not len(chosen):
        return
    chosen = chosen[np.lexsort((arrived[chosen], matched.of[chosen]))]
    begins = np.flatnonzero(np.diff(matched.of[chosen], prepend=-1))
    counts = np.diff([*begins, len(chosen)])
    which, last = matched.of[chosen[begins]], begins + counts - 1
    ended = matched.ended_ns[chosen]
    several = counts > 1
    times = arrived[chosen]
    matched.skew_ns[which[several]] = (times[last] - times[begins])[several]
    matched.late_ns[which[several]] = (times[last] - times[last - several])[several]
    matched.last_rank[which[several]] = calls.rank[chosen[last]][several]
    is_over = np.minimum.reduceat(calls["state"][chosen] == ENDED, begins) & several
    # A send may be over before anything is received: what counts is the end of the receive.
    is_send = calls.is_one_of(_SENDS)[chosen]
    over = np.where(is_send, _NEVER, ended)
    over = np.minimum.reduceat(over, begins)
    # Of a receive that came when all was there it is not known how long that took.
    waited = np.maximum.reduceat(
        np.where(is_p2p[chosen], np.where(is_send, 0, calls.waited_ns[chosen]), 1), begins
    )
    is_over &= (over < _NEVER) & (waited > 0)
    transfer = np.maximum(over - times[last], 0)
    matched.transfer_ns[which[is_over]] = transfer[is_over]
    pair = np.flatnonzero(is_p2p[chosen[begins]] & (counts == 2))
    early, late = chosen[begins[pair]], chosen[last[pair]]
    _wait_for(matched, early, late)
    _wait_for(matched, late, early)
    is_root = calls.rank == calls["peer_rank"]
    to_root = calls.is_one_of(_TO_ROOT)
    for place in np.flatnonzero(is_rooted[chosen[begins]]).tolist():
        members = chosen[begins[place] : last[place] + 1]
        root, others = members[is_root[members]], members[~is_root[members]]
        if not len(root) or not len(others):
            continue
        if to_root[root[0]]:
            _wait_for(matched, root[:1], others[-1:])
        else:
            _wait_for(matched, others, np.repeat(root[:1], len(others)))


def _wait_for(matched: Matched, who: Array, whom: Array) -> None:
    """Note that calls waited until others were made, as far as they were blocked then."""
    waited, ended = matched.calls.waited_ns[who], matched.ended_ns[who]
    idle = np.minimum(matched.arrived_ns[whom], ended) - (ended - waited)
    is_idle = (waited > 0) & (idle > 0)
    matched.is_split[who] = True
    matched.idle_ns[who[is_idle]] = idle[is_idle]
    matched.blocker[who[is_idle]] = matched.calls.rank[whom[is_idle]]


class CallKind(NamedTuple):
    """What operations are alike in; source and target only of an exchange, else -1."""

    group: str
    operation: str
    size_bytes: int
    source: int
    target: int


def kinds_of(matched: Matched) -> tuple[Array, list[CallKind]]:
    """Return the place of the kind of each operation, and the kinds."""
    calls, first = matched.calls, matched.first
    is_p2p, is_send = (calls.is_one_of(words)[first] for words in (P2P_OPERATIONS, _SENDS))
    rank, peer = calls.rank[first], calls["peer_rank"][first]
    source = np.where(is_p2p, np.where(is_send, rank, peer), -1)
    target = np.where(is_p2p, np.where(is_send, peer, rank), -1)
    operation = np.where(is_p2p, -1, calls.operation[first])
    keys = np.stack([calls.group[first], operation, calls["size_bytes"][first], source, target], 1)
    _, places, kind = np.unique(keys @ _FACTORS[:5], return_index=True, return_inverse=True)
    words = ["send", *calls.operations]
    return kind.reshape(-1), [
        CallKind(calls.groups[group], words[1 + code], size, *ends)
        for group, code, size, *ends in keys[places].tolist()
    ]


def usual_transfers(near: Matched, step: int) -> dict[CallKind, tuple[float, int]]:
    """Return how long transfers of each kind took in other steps: median ns and count."""
    kind, kinds = kinds_of(near)
    steps = near.calls["step"][near.first]
    chosen = np.flatnonzero((steps != step) & (steps > 0) & (near.transfer_ns >= 0))
    if not len(chosen):
        return {}
    chosen = chosen[np.argsort(kind[chosen], kind="stable")]
    begins = np.flatnonzero(np.diff(kind[chosen], prepend=-1))
    parts = np.split(near.transfer_ns[chosen], begins[1:])
    return {
        kinds[kind[chosen[begin]]]: (float(np.median(part)), len(part))
        for begin, part in zip(begins.tolist(), parts, strict=True)
    }
