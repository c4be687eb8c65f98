"""Who probes whom, and in which order: every node computes the same from the same list."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence

ALL_PAIRS_UP_TO = 64  # nodes: 2,016 pairs; above, pairs are sampled and the report says so
RACK = 32  # nodes next to each other in the list test all their pairs
NUM_CROSS = 32  # random peers of each node, half of them after it in a random circle
NUM_MATCHINGS = 8  # bandwidth rounds above ALL_PAIRS_UP_TO: 6-8 s, eight partners a node
SLOW_RATIO = 0.3  # of what is usual: slower is worth a second look
SURE_RATIO = 0.1  # the same where a single pair is good, and how good it is is not known
MAX_REPEATS = 2  # of one node in the second look: slow with two partners names the node

Pair = tuple[str, str]


def pairs_of(node: str, nodes: Sequence[str], run_id: str) -> tuple[str, ...]:
    """Return whom `node` probes, those after it first, so that no node is called by all at once.

    The relation is symmetric: each pair is tested in both directions. Above 64 nodes these are
    the rack, the other leaders for the first node of a rack, and 32 random ones.
    """
    at = nodes.index(node)
    rotation = [*nodes[at + 1 :], *nodes[:at]]
    if len(nodes) <= ALL_PAIRS_UP_TO:
        return tuple(rotation)
    first = at - at % RACK
    chosen = set(nodes[first : first + RACK]) | _cross(node, nodes, run_id)
    if at == first:
        chosen |= set(nodes[::RACK])
    return tuple(peer for peer in rotation if peer in chosen)


def rounds(nodes: Sequence[str], run_id: str) -> list[list[Pair]]:
    """Return rounds in which no two pairs share a node: all pairs, above 64 nodes eight of each.

    The circle method: one node has a fixed place, the others walk around it.
    """
    seats: list[str] = list(nodes)
    order = random.Random(f"{run_id}:rounds")
    order.shuffle(seats)
    if len(seats) % 2:
        seats.append("")  # who meets the empty seat has a break
    num, half = len(seats) - 1, len(seats) // 2
    turns: Sequence[int] = range(num)
    if len(nodes) > ALL_PAIRS_UP_TO:
        turns = order.sample(turns, NUM_MATCHINGS)
    drawn = []
    for turn in turns:
        circle = [seats[0], *seats[num - turn + 1 :], *seats[1 : num - turn + 1]]
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        drawn.append([pair for pair in pairs if "" not in pair])
    return [one for one in drawn if one]


def again(mbit_per_s: Mapping[Pair, float], expect_mbit_per_s: float = 0.0) -> list[list[Pair]]:
    """Return the rounds of the second look at slow pairs, slow nodes with their fastest partners.

    `mbit_per_s` holds every direction measured. No node plays more than twice; none slow: [].
    """
    slow = slow_pairs(mbit_per_s, expect_mbit_per_s)
    if not slow:
        return []
    of_node: dict[str, list[float]] = {}
    for pair, speed in mbit_per_s.items():
        for node in pair:
            of_node.setdefault(node, []).append(speed)
    pace = {node: statistics.median(speeds) for node, speeds in of_node.items()}
    pairs = {(min(pair), max(pair)) for pair in slow}
    drawn: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda p: (-max(pace[p[0]], pace[p[1]]), p)):
        busy = [{node for played in one for node in played} for one in drawn]
        if any(sum(node in one for one in busy) >= MAX_REPEATS for node in pair):
            continue
        for one, taken in zip(drawn, busy, strict=True):
            if not taken & {*pair}:
                one.append(pair)
                break
        else:
            drawn.append([pair])
    return drawn


def slow_pairs(mbit_per_s: Mapping[Pair, float], expect_mbit_per_s: float = 0.0) -> list[Pair]:
    """Return the directions below what was asked for, or far below what is usual here."""
    limit = max(slow_limit(mbit_per_s), expect_mbit_per_s)
    return [pair for pair, speed in mbit_per_s.items() if speed < limit]


def slow_limit(mbit_per_s: Mapping[Pair, float]) -> float:
    """Return the speed, Mbit/s, below which a direction is slow; 0: nothing to compare with."""
    middle = usual(mbit_per_s)
    good = {frozenset(pair) for pair, s in mbit_per_s.items() if s >= SLOW_RATIO * middle}
    if not middle or not good:
        return 0.0
    return (SLOW_RATIO if len(good) > 1 else SURE_RATIO) * middle


def usual(mbit_per_s: Mapping[Pair, float]) -> float:
    """Return the usual speed of a direction, Mbit/s; 0 with fewer than three nodes.

    The median of all directions. One slow node has half of all pairs among four nodes and more
    among three: there it is the median of each node's best.
    """
    best: dict[str, float] = {}
    for pair, speed in mbit_per_s.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), speed)
    if len(best) < 3:
        return 0.0
    return statistics.median(mbit_per_s.values() if len(best) > 4 else best.values())


def coverage(nodes: Sequence[str]) -> str:
    """Return the sentence that says how many pairs are tested; "" for all of them."""
    num = len(nodes)
    if num <= ALL_PAIRS_UP_TO:
        return ""
    racks = [min(RACK, num - first) for first in range(0, num, RACK)]
    inside = sum(size * (size - 1) // 2 for size in racks)
    leaders = len(racks) * (len(racks) - 1) // 2
    total = num * (num - 1) // 2
    share = (inside + leaders) / total
    share += (1 - share) * NUM_CROSS / (num - 1)
    return (
        f"tested {share:.0%} of pairs".replace("%", " %")
        + f": racks of {RACK}, their leaders, and {NUM_CROSS} random peers of each node"
    )


def _cross(node: str, nodes: Sequence[str], run_id: str) -> set[str]:
    """Return random peers: neighbours at 16 random distances, on both sides of a random circle."""
    draw = random.Random(f"{run_id}:cross")
    circle = list(nodes)
    draw.shuffle(circle)
    distances = draw.sample(range(1, (len(nodes) + 1) // 2), NUM_CROSS // 2)
    at = circle.index(node)
    return {circle[(at + way) % len(circle)] for way in (*distances, *(-d for d in distances))}
