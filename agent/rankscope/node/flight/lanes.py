"""Finds for each entry of the Flight Recorder the slot of the same call.

The two count apart: NCCL's sequence counts a coalesced batch once and begins with the group, ours
counts calls and begins with the agent; for send and recv NCCL counts per group, we per peer. What
both have is the order of the calls within a group, and the same clock: an entry is made inside
the call that the slot describes. So each lane (the collectives of a group, or its exchanges with
one peer in one direction) is walked in order, each step verified by kind and time. Where the
verification fails the lane is anchored anew: by sequence, else by the times of the next entries.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankscope.files.flight_recorder import FlightEntry
from rankscope.wire import schema

# Both clocks of a host are slewed alike, so a (monotonic, wall) pair holds until one is stepped.
SLACK_NS = 100_000
_VOTES = 32
_DECISIVE = 4  # votes, and two thirds of them
_FAR = 1 << 62
_PEER = re.compile(r"(?:send \d+->|recv \d+<-)(\d+)")
_KINDS = (  # the first part that a name contains; longer ones first
    "reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier", "gather",
    "scatter", "reduce", "send", "recv",
)  # fmt: skip
# what a backend makes of a call, where that is another operation
_BECOMES = {
    "barrier": {"all_reduce"},
    "all_gather": {"broadcast"},  # pieces of unequal size
    "reduce_scatter": {"reduce", "all_reduce"},
    "other": {*_KINDS},
}


class LaneKey(NamedTuple):
    """Entries that are in the order of calls: `peer` is a global rank, -1 all or not known."""

    pg_id: int
    name: str
    kind: str  # empty for collectives, else send or recv
    peer: int


@dataclass
class Lane:
    """How far the entries of one lane have been followed."""

    cursor: int = -1  # slot number of the last one that was found
    ahead: int = 0  # our sequence minus theirs, at that one
    is_anchored: bool = False
    batch: tuple[int, bool, int] = (-1, False, 0)  # of that one: a call may become several pieces


@dataclass
class LaneSlots:
    """The slots that a lane may find, in the order of the calls. Times are monotonic ns."""

    number: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)

    def fits(self, at: int, kind: str, created: int) -> bool:
        """Return whether an entry of this kind and time can be that of slot `at`."""
        return (
            0 <= at < len(self.number)
            and self.arrived[at] - SLACK_NS <= created <= self.returned[at] + SLACK_NS
            and (kind in ("", self.kind[at]) or kind in _BECOMES.get(self.kind[at], ()))
        )

    def last_before(self, created: int) -> int:
        """Return the place of the last call that was entered before this time."""
        return bisect_right(self.arrived, created) - 1


def key_of(entry: FlightEntry, pg_config: Mapping[str, Mapping[str, str]]) -> LaneKey:
    """Return the lane of an entry; NCCL names peers within the group."""
    name = entry.process_group[0]
    if not entry.is_p2p:
        return LaneKey(entry.pg_id, name, "", -1)
    kind, peer_match = kind_of(entry.profiling_name), _PEER.search(entry.profiling_name)
    ranks = [int(rank) for rank in re.findall(r"\d+", pg_config.get(name, {}).get("ranks", ""))]
    peer = int(peer_match[1]) if peer_match else -1
    return LaneKey(entry.pg_id, name, kind, ranks[peer] if 0 <= peer < len(ranks) else -1)


def kind_of(name: str) -> str:
    """Return what sort of operation a name speaks of, empty where that is not known."""
    text = name.partition(":")[2] or name
    text = text.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
    return next((kind for kind in _KINDS if kind in text), "")


_KIND_OF_OPERATION = [kind_of(name) or "other" for name in schema.OPERATIONS]


def groups_named(name: str, labels: Mapping[int, str]) -> list[int]:
    """Return the groups that torch calls `name`: a world made again uses its names again."""
    same = re.compile(re.escape(name) + r"(#\d+)?(\.\d+)?(@\d+)?")
    return [index for index, label in labels.items() if same.fullmatch(label)]


def slots_of(key: LaneKey, slots: Any, groups: Sequence[int]) -> LaneSlots:
    """Return the slots of a lane; `slots` are in the order of their numbers."""
    import numpy as np

    is_p2p = (slots["flags"] & schema.FLAG_P2P) != 0
    chosen = slots[np.isin(slots["group_id"], groups) & (is_p2p == bool(key.kind))]
    if key.peer >= 0:
        chosen = chosen[(chosen["peer_rank"] == key.peer) | (chosen["peer_rank"] < 0)]
    kinds = [_KIND_OF_OPERATION[index] if index < len(_KIND_OF_OPERATION) else "other"
             for index in chosen["operation"].tolist()]  # fmt: skip
    lane_slots = LaneSlots(
        (chosen["number"].astype(np.int64) - 1).tolist(),
        chosen["arrived_ns"].tolist(),
        [returned or _FAR for returned in chosen["returned_ns"].tolist()],
        chosen["sequence"].tolist(),
        kinds,
    )
    if key.kind:
        places = [at for at, kind in enumerate(lane_slots.kind) if kind == key.kind]
        for name in ("number", "arrived", "returned", "sequence", "kind"):
            values = getattr(lane_slots, name)
            setattr(lane_slots, name, [values[at] for at in places])
    return lane_slots


def place(
    lane: Lane, slots: LaneSlots, entries: Sequence[tuple[FlightEntry, int]], first: int
) -> int | None:
    """Return the slot number of entry `first`, None where no slot fits, and move the lane on.

    `entries` are all new ones of the lane, each with its time of creation, monotonic ns.
    """
    entry, created = entries[first]
    kind = kind_of(entry.profiling_name)
    if lane.is_anchored:
        at = bisect_right(slots.number, lane.cursor)
        if not slots.fits(at, kind, created):
            is_piece = lane.batch == entry.batch and slots.fits(at - 1, kind, created)
            at = at - 1 if is_piece else _anchor(lane, slots, entries, first)
    else:
        at = _anchor(lane, slots, entries, first)
    if not slots.fits(at, kind, created):
        return None
    lane.cursor, lane.is_anchored, lane.batch = slots.number[at], True, entry.batch
    lane.ahead = slots.sequence[at] - entry.collective_seq_id
    return slots.number[at]


def _anchor(
    lane: Lane, slots: LaneSlots, entries: Sequence[tuple[FlightEntry, int]], first: int
) -> int:
    """Return the likeliest place of an entry, to be verified; it may be before the first slot."""
    votes: Counter[int] = Counter()
    for offset, (other, when) in enumerate(entries[first : first + _VOTES]):
        at = slots.last_before(when)
        if slots.fits(at, kind_of(other.profiling_name), when):
            votes[at - offset] += 1
    for at, count in votes.most_common(1):
        if count >= _DECISIVE and count * 3 >= votes.total() * 2:
            return at
    entry, created = entries[first]
    near = slots.last_before(created)
    if entry.is_p2p:
        return near
    wanted = entry.collective_seq_id + lane.ahead
    for at in range(near, max(-1, near - _VOTES), -1):  # calls of several threads overlap
        if slots.sequence[at] == wanted and slots.fits(at, kind_of(entry.profiling_name), created):
            return at
    return near
