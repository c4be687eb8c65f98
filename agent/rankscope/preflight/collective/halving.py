"""Which member slows all: collectives among halves of the nodes, and halves of the slower half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from rankscope.wire.formulas import busbw_bytes_per_second

# Two halves without a slow member differed by up to 1.3 x on idle and by 1.6 x on loaded machines
# (three processes on two cores); a node that is worth naming costs twice the time or more.
SLOWER_RATIO = 1.7


def search(
    num_nodes: int, size_bytes: int, measure: Callable[[tuple[int, ...]], float]
) -> list[tuple[tuple[int, ...], float]]:
    """Return the groups that were measured, with their seconds, in order.

    What seems slow at first is measured again before it is divided, as a machine that is busy just
    then is not slow; of a group that is there twice the best counts.

    `measure` runs an all-reduce of `size_bytes` among some of the nodes. It must return the same
    on all nodes, so that all take the same way: then no message is needed to agree on it.
    """
    measured: list[tuple[tuple[int, ...], float]] = []

    def speed(group: tuple[int, ...]) -> float:
        seconds = measure(group)
        measured.append((group, seconds))
        return busbw_bytes_per_second("all_reduce", size_bytes, seconds, len(group)) or 0.0

    if num_nodes == 3:  # a half of three has one member: take the pairs
        speeds = {pair: speed(pair) for pair in combinations(range(3), 2)}
        for pair, found in speeds.items():
            if max(speeds.values()) >= found * SLOWER_RATIO:
                speed(pair)
        return measured
    suspects: Sequence[int] = range(num_nodes)
    cleared: list[int] = []
    while len(suspects) > 1 and num_nodes > 3:
        middle = len(suspects) // 2
        halves = sorted(
            (suspects[:middle], suspects[middle:]),
            key=lambda half: speed(tuple([*half, *cleared[:1]] if len(half) == 1 else half)),
        )
        slow, fast = (speed_of(measured, half, size_bytes) for half in halves)
        if fast >= slow * SLOWER_RATIO and not cleared:
            slow = max(slow, speed(tuple(halves[0])))
        if fast < slow * SLOWER_RATIO:
            break
        cleared += halves[1]
        suspects = halves[0]
    return measured


def speed_of(
    measured: Sequence[tuple[tuple[int, ...], float]], half: Sequence[int], size_bytes: int
) -> float:
    """Return the bus bandwidth of the newest group that holds all of `half`."""
    group, seconds = next(row for row in reversed(measured) if set(half) <= set(row[0]))
    return busbw_bytes_per_second("all_reduce", size_bytes, seconds, len(group)) or 0.0
