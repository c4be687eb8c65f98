"""What ranks send each other in some steps, in the order in which they have and need it.

A send is at the moment at which it was issued, as its data was ready then, a receive at the one at
which it ended. Moments are those of the rank's own clock: no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.findings.statistics import Array

_SEND, _RECEIVE = 1, 2
_KINDS = {"send": _SEND, "recv": _RECEIVE}


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Sends and receives: arrays of one length, by rank, step and moment."""

    rank: Array
    step: Array
    peer: Array
    is_send: Array
    worked_ms: Array  # self time since the exchange before in this step, 0 for its first
    blocked_ms: Array
    took_ms: Array  # from the call to the end

    @property
    def is_first(self) -> Array:
        """Return which are the first of their rank in their step."""
        first = np.ones(len(self.rank), bool)
        first[1:] = (self.rank[1:] != self.rank[:-1]) | (self.step[1:] != self.step[:-1])
        return first

    def transfers_ms(self) -> Array:
        """Return for each how long it took once both sides were there; NaN of which one is known.

        The side that came last waited for the transfer alone.
        """
        source = np.where(self.is_send, self.rank, self.peer)
        target = np.where(self.is_send, self.peer, self.rank)
        order = np.lexsort((self.is_send, target, source, self.step))
        keys = np.stack([self.step, source, target, self.is_send])[:, order]
        begins = np.flatnonzero(np.r_[True, np.any(np.diff(keys) != 0, axis=0)])
        counts = np.diff(np.r_[begins, len(order)])
        place = np.empty(len(order), np.int64)  # the n-th from one to the other in its step
        place[order] = np.arange(len(order)) - np.repeat(begins, counts)
        pair = np.lexsort((self.is_send, place, target, source, self.step))
        names = np.stack([self.step, source, target, place])[:, pair]
        is_same = np.r_[False, np.all(np.diff(names) == 0, axis=0)]
        found = np.full(len(order), np.nan)
        second = np.flatnonzero(is_same)
        least = np.minimum(self.took_ms[pair[second]], self.took_ms[pair[second - 1]])
        found[pair[second]] = found[pair[second - 1]] = least
        return found


def exchanges_of(rows: Mapping[str, Array], operations: Sequence[str]) -> Exchanges:
    """Return the exchanges among rows of an `EventTable`; those without an end are left out."""
    kind = np.array([_KINDS.get(word, 0) for word in operations], np.int64)[rows["operation"]]
    took = np.where(rows["duration_ms"] >= 0, rows["duration_ms"], rows["returned_ms"])
    known = (took >= 0) | (kind == _SEND)
    kind, took = kind[known], took[known].astype(np.float64)
    rank, step, peer = (rows[name][known].astype(np.int64) for name in ("rank", "step", "peer"))
    blocked = np.maximum(rows["blocked_ms"][known], 0.0).astype(np.float64)
    arrived = rows["arrived_ns"][known]
    since = (arrived - arrived.min(initial=1 << 62)) * 1e-6
    moment = since + np.where(kind == _SEND, 0.0, took)
    order = np.lexsort((moment, step, rank))
    rank, step, peer, kind = rank[order], step[order], peer[order], kind[order]
    blocked, moment, took = blocked[order], moment[order], took[order]
    ahead = np.where(kind == _SEND, 0.0, blocked)  # a send may block after its moment
    worked = np.diff(moment, prepend=0.0) - ahead - np.r_[0.0, (blocked - ahead)[:-1]]
    is_other = np.r_[True, (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])][: len(rank)]
    total = np.cumsum(np.where(is_other, 0.0, np.maximum(worked, 0.0)))
    chosen = kind > 0
    found = Exchanges(
        rank[chosen], step[chosen], peer[chosen], kind[chosen] == _SEND,
        np.diff(total[chosen], prepend=0.0), blocked[chosen], took[chosen],
    )  # fmt: skip
    found.worked_ms[found.is_first] = 0.0
    return found
