"""Which rank waited for which, and when, from the same collective in the traces of several ranks.

No clocks of two ranks are compared: of one collective, the rank that arrives last has the shortest
time, and what others take longer they waited, from its begin on. Waits of operations that are open
together count once, and only where no computation covers them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.formulas import item_bytes
from rankscope.wire.schema import C10_DTYPES, P2P_OPERATIONS
from rankscope_server.importers.profiler_trace import Operation

Array = NDArray[Any]
Call: TypeAlias = tuple[str, int, str]  # kind, bytes, dtype
UNKNOWN_GROUP = "unknown group"
_TYPES = {"float": "float32", "double": "float64", "long int": "int64", "int": "int32",
          "c10::half": "float16", "c10::bfloat16": "bfloat16"}  # fmt: skip


@dataclass(slots=True)
class Placed:
    """An operation of a rank within a step; `waited_us` is what its peers made it wait."""

    operation: Operation
    group: str
    kind: str
    step: int
    open_us: float  # how long the rank may have waited for it: its duration, or less
    sequence: int = 0
    waited_us: float = 0.0

    @property
    def call(self) -> Call:
        """Return what distinguishes an operation from another one of its group."""
        size, _, dtype = bytes_of(self.operation.args)
        return self.kind, size, dtype


def bytes_of(args: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return input bytes, output bytes, dtype; -1 where they are not recorded."""
    if "In msg nelems" in args:
        dtype = C10_DTYPES.get(str(args.get("dtype")), "other")
        sizes = [args.get("In msg nelems"), args.get("Out msg nelems", args.get("In msg nelems"))]
        known = [one * item_bytes(dtype) if isinstance(one, int) else -1 for one in sizes]
        return known[0], known[1], dtype
    dims, types = args.get("Input Dims"), args.get("Input type")
    try:
        count = sum(math.prod(shape) for shape in dims) if dims else -1
        dtype = _TYPES.get(str(types[0]) if types else "", "other")
        size = count * item_bytes(dtype) if count >= 0 else -1
    except TypeError:
        return -1, -1, "other"
    return size, size, dtype


def match(ranks: Mapping[int, Sequence[Placed]]) -> None:
    """Number the operations of each group alike on all ranks, and find who waited how long.

    Threads of gloo take operations up in another order on each rank, so the n-th call of one size
    is matched with the n-th of that size. A group of which the ranks have different
    operations in a step is not numbered in it: a trace that lost events must not look like a rank
    that skipped a call.
    """
    seen: dict[tuple[str, int], dict[int, list[Placed]]] = defaultdict(dict)
    for rank, placed in ranks.items():
        for one in placed:
            if one.group != UNKNOWN_GROUP and one.kind not in P2P_OPERATIONS:
                seen[one.group, one.step].setdefault(rank, []).append(one)
    count: dict[str, int] = defaultdict(int)
    for (group, _), by_rank in sorted(seen.items(), key=lambda item: (item[0][1], item[0][0])):
        for together in _together(list(by_rank.values())):
            count[group] += 1
            shortest = min(one.open_us for one in together)
            for one in together:
                one.sequence = count[group]
                one.waited_us = one.open_us - shortest


def _together(programs: Sequence[Sequence[Placed]]) -> list[list[Placed]]:
    """Return the same operation of all ranks, in the order of the first; none if they differ."""
    calls = [[one.call for one in program] for program in programs]
    if any(Counter(mine) != Counter(calls[0]) for mine in calls):
        return []
    found: list[list[Placed]] = []
    places: dict[Call, list[int]] = defaultdict(list)
    for place, call in enumerate(calls[0]):
        places[call].append(place)
        found.append([])
    for program, mine in zip(programs, calls, strict=True):
        next_of = {call: iter(where) for call, where in places.items()}
        for one, call in zip(program, mine, strict=True):
            found[next(next_of[call])].append(one)
    return found


def waits(placed: Iterable[Placed], work: Array) -> Array:
    """Return when a rank waited for its peers and computed nothing: intervals, n x 2, in us."""
    waited = [
        (one.operation.start_us, one.operation.start_us + one.waited_us)
        for one in placed
        if one.waited_us > 0
    ]
    pieces = [_without(start, end, work) for start, end in union(waited)]
    return np.concatenate(pieces) if pieces else np.zeros((0, 2))


def union(intervals: Any) -> Array:
    """Return disjoint intervals, n x 2, in order."""
    pairs = np.asarray(intervals, np.float64).reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    if not len(pairs):
        return pairs
    ends = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate([[True], pairs[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pairs[first, 0], ends[last]], axis=1)


def _without(start: float, end: float, work: Array) -> Array:
    """Return what is left of an interval without the disjoint intervals of `work`."""
    low = int(np.searchsorted(work[:, 1], start, side="right"))
    high = int(np.searchsorted(work[:, 0], end, side="left"))
    inside = work[low:high]
    pieces = np.stack([np.append(start, inside[:, 1]), np.append(inside[:, 0], end)], axis=1)
    return pieces[pieces[:, 1] > pieces[:, 0]]
