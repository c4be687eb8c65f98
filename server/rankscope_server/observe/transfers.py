"""How long the transfers of each group take: what is left when late ranks are removed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rankscope.wire.schema import ENDED, FLAG_END_FROM_WAIT, FLAG_P2P
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.components import ratios
from rankscope_server.observe.event_table import EventTable

Path: TypeAlias = str | tuple[int, int]  # a group by name, or sender and receiver
# Broadcasts, gathers and scatters may end on one rank before another came: who waits least says
# nothing of the transfer.
MEETS = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TransferKind:
    """One kind of transfer of a path: what is compared with the same of other paths."""

    path: Path
    operation: str
    size_octave: int


@dataclass(frozen=True, slots=True)
class PathTimes:
    """What is known of the transfers of one path in the chosen steps."""

    ratio: float  # ln of its usual time over that of its kind
    extra_ms: float  # of a step, beyond the usual time of its kind
    took_ms: float  # of a step
    operations: int


def transfer_times(
    events: EventTable, rows: Mapping[str, Array], members: Mapping[str, int]
) -> dict[TransferKind, Array]:
    """Return the ms of each transfer, in order of number, by path, operation and octave of bytes.

    The last to arrive waits least, so the least duration of all members is the transfer; numbers
    of which a member is not known are left out. `members` says how many a group has.
    """
    is_p2p = (rows["flags"] & FLAG_P2P) != 0
    good = (rows["state"] == ENDED) & (rows["transfer_ms"] > 0) & (rows["sequence"] > 0)
    good &= (rows["flags"] & FLAG_END_FROM_WAIT) == 0
    found: dict[TransferKind, Array] = {}
    operations, groups = events.words("operation"), events.words("group")
    meets = np.array([name in MEETS for name in operations] or [False])
    sides = np.array([1 if name == "send" else -(name == "recv") for name in operations] or [0])
    both = good & ~is_p2p & meets[rows["operation"]]
    need = np.array([members.get(name, 0) for name in groups] or [0])
    _collect(found, rows, both, ("group", "operation"), need[rows["group"]],
             lambda key: (groups[key[0]], operations[key[1]]))  # fmt: skip
    side = sides[rows["operation"]]
    pairs = good & is_p2p & (side != 0) & (rows["peer"] >= 0)
    sender = np.where(side > 0, rows["rank"], rows["peer"])
    receiver = np.where(side > 0, rows["peer"], rows["rank"])
    ends = dict(rows) | {"sender": sender, "receiver": receiver}
    _collect(found, ends, pairs, ("group", "sender", "receiver"), np.full(len(side), 2),
             lambda key: ((int(key[1]), int(key[2])), "send"))  # fmt: skip
    return found


def _collect(
    found: dict[TransferKind, Array],
    rows: Mapping[str, Array],
    chosen: Array,
    names: Sequence[str],
    need: Array,
    name_of: Any,
) -> None:
    at = np.flatnonzero(chosen)
    if not len(at):
        return
    octave = np.log2(np.maximum(rows["size_bytes"][at], 1)).astype(np.int64)
    keys = [rows[name][at].astype(np.int64) for name in names]
    columns = [*keys, octave, rows["sequence"][at].astype(np.int64)]
    order = _order_of(columns)
    table = np.stack([column[order] for column in columns])
    took, need = rows["transfer_ms"][at][order], need[at][order]
    first = _begins(table)
    count = np.diff(np.append(first, len(order)))
    least = np.minimum.reduceat(took, first)
    table, whole = table[:, first], (count == need[first]) & (count > 1)
    table, least = table[:, whole], least[whole].astype(float)
    if not len(least):
        return
    begin = _begins(table[:-1])
    for place, end in zip(begin, [*begin[1:], len(least)], strict=True):
        key = table[:, place]
        path, operation = name_of(key)
        found[TransferKind(path, operation, int(key[-2]))] = least[place:end]


def _order_of(columns: Sequence[Array]) -> Array:
    """Return the order of rows by these columns, the first one first; of equal ones any."""
    key, room = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        room *= high - low + 1
        if room >= 1 << 62:
            return np.lexsort(columns[::-1])
        key = key * (high - low + 1) + (column - low)
    return np.argsort(key)


def _begins(table: Array) -> Array:
    """Return the columns of a table that are not as the one before."""
    is_begin = np.ones(table.shape[1], bool)
    np.any(table[:, 1:] != table[:, :-1], axis=0, out=is_begin[1:])
    return np.flatnonzero(is_begin)


def compared(
    times: Mapping[TransferKind, Array],
    kind_of: Mapping[Path, Hashable],
    num_steps: int,
    policy: Policy,
) -> dict[Path, PathTimes]:
    """Return how each path compares with others of its kind: same size, as many hosts."""
    kinds = {call: (kind_of[call.path], call.operation, call.size_octave) for call in times}
    by_call = ratios({call: times[call].tolist() for call in times}, kinds, policy)
    of_path: dict[Path, list[TransferKind]] = defaultdict(list)
    for call in by_call:
        of_path[call.path].append(call)
    found = {}
    for path, calls in of_path.items():
        took = [float(times[call].sum()) / num_steps for call in calls]
        usual = [one / float(np.exp(by_call[call])) for one, call in zip(took, calls, strict=True)]
        found[path] = PathTimes(
            float(np.median([by_call[call] for call in calls])),
            max(0.0, sum(took) - sum(usual)),
            sum(took),
            sum(len(times[call]) for call in calls),
        )
    return found
