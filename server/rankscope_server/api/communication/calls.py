"""Single calls of some steps, side by side, and what follows from calls of one number. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.wire.schema import ENDED, FLAG_END_FROM_WAIT, FLAG_P2P
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.transfers import MEETS

NUMBERS = (
    "step", "sequence", "size_bytes", "peer_rank", "state", "flags", "arrived_ns", "duration_ns",
    "started_ns", "device_duration_ns", "blocked_ns",
)  # fmt: skip
NO_SIZE = -1
UNSURE = -1


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of ranks; arrays of one length, -1 where a number is not known."""

    rank: Array
    group: Array  # places in `groups`
    operation: Array  # places in `operations`
    numbers: Mapping[str, Array]  # by the names of `NUMBERS`
    groups: list[str]
    operations: list[str]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def octave(self) -> Array:
        """Return the size class of each: floor(log2(bytes)), `NO_SIZE` for none."""
        sizes = self.numbers["size_bytes"]
        octaves = np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64)
        return np.where(sizes > 0, octaves, NO_SIZE)

    @property
    def present_ns(self) -> Array:
        """Return how long the rank was there: until the end, on its device where that is known."""
        device = self.numbers["device_duration_ns"]
        return np.where(device >= 0, device, self.numbers["duration_ns"])

    @property
    def transfer_ns(self) -> Array:
        """Return how long the backend was at it: on the device, else since it began, else all."""
        began, took = self.numbers["started_ns"], self.numbers["duration_ns"]
        since = np.where((began >= 0) & (took >= 0), took - began, took)
        device = self.numbers["device_duration_ns"]
        return np.where(device >= 0, device, since)


@dataclass(frozen=True, slots=True)
class Meetings:
    """Collectives that all members of their group made: the n-th call of each, matched.

    The last to arrive was there for the shortest time, so that time is the transfer's. Who that was
    is known by two signals: clocks, exact on one host, and how long each was there, which needs no
    clock but that all end together (a slow link ends some earlier). Over several hosts both have to
    name one rank, and the smaller spread counts; on devices there are durations alone.
    """

    group: Array
    operation: Array
    octave: Array
    size_bytes: Array
    step: Array  # that of its last member
    transfer_ns: Array  # of the member for which it was shortest
    spread_ns: Array  # from the first arrival to the last
    last_rank: Array  # UNSURE where the signals name different ranks
    num_incomplete: int  # numbers of which a member is not known


def meetings(calls: Calls, members: Mapping[str, int], host_of: Mapping[int, str]) -> Meetings:
    """Return the collectives of which every member's call is known; `members` says how many."""
    at, first, count = _by_number(calls)
    needed = np.array([members.get(name, 0) for name in calls.groups] or [0])
    whole = (count == needed[calls.group[at[first]]]) & (count > 1)
    kept = np.repeat(whole, count)
    at, count = at[kept], count[whole]
    first = np.cumsum(count) - count
    arrived, present = calls.numbers["arrived_ns"], calls.present_ns
    by_clock = _Span.of(arrived[at], first, count)
    by_stay = _Span.of(-present[at], first, count)
    where = hosts_of(calls.rank[at], host_of)
    one_host = _Span.of(where, first, count).length == 0
    on_device = _any(calls.numbers["device_duration_ns"][at] >= 0, first)
    clock_rank, stay_rank = calls.rank[at[by_clock.largest]], calls.rank[at[by_stay.largest]]
    agreed = np.where(clock_rank == stay_rank, clock_rank, UNSURE)
    alone = [on_device, one_host]
    smaller = np.minimum(by_clock.length, by_stay.length)
    head = at[first]
    return Meetings(
        group=calls.group[head],
        operation=calls.operation[head],
        octave=calls.octave[head],
        size_bytes=calls.numbers["size_bytes"][head],
        step=calls.numbers["step"][at[by_stay.largest]],
        transfer_ns=-_Span.of(-calls.transfer_ns[at], first, count).most,
        spread_ns=np.select(alone, [by_stay.length, by_clock.length], smaller),
        last_rank=np.select(alone, [stay_rank, clock_rank], agreed),
        num_incomplete=int((~whole).sum()),
    )


def hosts_of(ranks: Array, host_of: Mapping[int, str]) -> Array:
    """Return the number of the host of each rank, in the order of their names; -1: not known."""
    numbers = {host: place for place, host in enumerate(sorted(set(host_of.values())))}
    table = np.full(int(ranks.max(initial=-1)) + 2, -1)  # the last one: of rank -1
    for rank, host in host_of.items():
        if host and rank < len(table) - 1:
            table[rank] = numbers[host]
    return table[ranks]


def _by_number(calls: Calls) -> tuple[Array, Array, Array]:
    """Return the places of ended collectives by group and number; where each begins, how many."""
    meets = np.array([name in MEETS for name in calls.operations] or [False])
    flags = calls.numbers["flags"]
    good = meets[calls.operation] & (calls.numbers["state"] == ENDED) & (calls.present_ns >= 0)
    good &= (calls.numbers["sequence"] > 0) & ((flags & (FLAG_P2P | FLAG_END_FROM_WAIT)) == 0)
    at = np.flatnonzero(good)
    at = at[_each_once(calls.rank[at], calls.numbers["sequence"][at], calls.group[at])]
    keys = np.stack([calls.group[at], calls.numbers["sequence"][at]])
    first = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-1) != 0, axis=0))
    return at, first, np.diff(np.append(first, len(at)))


@dataclass(frozen=True, slots=True)
class _Span:
    """Of each run of values: the largest, where it is, and how far it is from the least."""

    most: Array
    largest: Array  # place among all values
    length: Array

    @staticmethod
    def of(values: Array, first: Array, count: Array) -> _Span:
        """Return it for the runs that begin at `first`."""
        if not len(first):
            nothing = np.zeros(0, np.int64)
            return _Span(nothing, nothing, nothing)
        most, least = np.maximum.reduceat(values, first), np.minimum.reduceat(values, first)
        is_most = values == np.repeat(most, count)
        place = np.where(is_most, np.arange(len(values)), len(values))
        return _Span(most, np.minimum.reduceat(place, first), most - least)


def _any(values: Array, first: Array) -> Array:
    found: Array = np.logical_or.reduceat(values, first) if len(first) else np.zeros(0, bool)
    return found


def _each_once(rank: Array, sequence: Array, group: Array) -> Array:
    """Return the places of the last of each (group, number, rank)."""
    order = np.lexsort((rank, sequence, group))
    keys = np.stack([group, sequence, rank])[:, order]
    is_last = np.any(np.diff(keys, axis=1, append=-1) != 0, axis=0)
    return order[is_last]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Messages from one rank to another that both ends recorded."""

    sender: Array
    receiver: Array
    size_bytes: Array
    took_ns: Array
    is_at_most: Array  # it took no longer: a part of the time may be waiting


def transfers(calls: Calls, host_of: Mapping[int, str]) -> Transfers:
    """Return the matched point-to-point messages.

    Devices know how long a transfer took: the end at which it took less did not wait for the other.
    Of a host it is known that the data moved after the send was called and before the receive
    ended; how long each call took shows nothing, as a message may lie in buffers between. Over two
    hosts their clocks may make that too short: it is at least what the quicker call took.
    """
    sides = np.array([(name == "send") - (name == "recv") for name in calls.operations] or [0])
    side, peer, took = sides[calls.operation], calls.numbers["peer_rank"], calls.transfer_ns
    good = (side != 0) & (peer >= 0) & (took > 0) & (calls.numbers["state"] == ENDED)
    at = np.flatnonzero(good & (calls.numbers["sequence"] > 0))
    side, peer, rank = side[at], peer[at], calls.rank[at]
    sender, receiver = np.where(side > 0, rank, peer), np.where(side > 0, peer, rank)
    table = np.stack([calls.group[at], sender, receiver, calls.numbers["sequence"][at]])
    order = np.lexsort((side, *table[::-1]))  # of a pair the receive first
    table, at, side = table[:, order], at[order], side[order]
    is_pair = np.zeros(len(at), bool)
    is_pair[:-1] = np.all(table[:, 1:] == table[:, :-1], axis=0) & (side[1:] > side[:-1])
    place = np.flatnonzero(is_pair)
    receives, sends = at[place], at[np.minimum(place + 1, len(at) - 1)] if len(at) else at
    quicker = np.minimum(took[receives], took[sends])
    arrived = calls.numbers["arrived_ns"]
    moved = arrived[receives] + calls.numbers["duration_ns"][receives] - arrived[sends]
    start, end = (hosts_of(table[row, place], host_of) for row in (1, 2))
    same = (start == end) & (start >= 0)
    device = calls.numbers["device_duration_ns"]
    is_exact = (device[receives] >= 0) & (device[sends] >= 0)
    by_clock = np.where(same, np.maximum(moved, 1), np.maximum(moved, quicker))
    return Transfers(
        sender=table[1, place],
        receiver=table[2, place],
        size_bytes=calls.numbers["size_bytes"][receives],
        took_ns=np.where(is_exact, quicker, by_clock),
        is_at_most=~is_exact,
    )
