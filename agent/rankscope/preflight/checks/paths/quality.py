"""What the checks of path quality share: what is usual here, whom to name, who was too busy."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.blame import Blame, Path, blame
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import arrows, ordered
from rankscope.preflight.facts.edges import EdgeFacts

NODE_SHARE = 0.5  # of its paths must be bad, two at least, before a node is named
ALONE = 3.0  # times as far above, where one pair is all that there is to compare with
FEW = 4  # nodes: one bad node has half of all pairs among four, and more among three


def both_ends(run: Run) -> Iterator[tuple[str, str, EdgeFacts]]:
    """Yield the measured paths whose other end has reported as well."""
    for start, end, edge in run.edges():
        if end in run.reports:
            yield start, end, edge


def usual(values: Mapping[Path, float]) -> float | None:
    """Return the usual value of a path where low is good; None with fewer than three nodes."""
    best: dict[str, float] = {}
    for path, value in values.items():
        for node in path:
            best[node] = min(best.get(node, value), value)
    if len(best) < 3:
        return None
    return statistics.median(values.values() if len(best) > FEW else best.values())


def high(values: Mapping[Path, float], ratio: float, floor: float) -> tuple[Path, ...]:
    """Return the paths far above the usual value; further where a single pair is good."""
    middle = usual(values)
    if middle is None:
        return ()
    limit = max(ratio * middle, floor)
    good = {frozenset(path) for path, value in values.items() if value <= limit}
    if len(good) == 1:
        limit *= ALONE
    return tuple(path for path, value in values.items() if value > limit) if good else ()


def seen_from_both(values: Mapping[Path, float]) -> dict[Path, float]:
    """Return the lower of what both ends measured: each confirms the other."""
    return {
        (start, end): min(value, values.get((end, start), value))
        for (start, end), value in values.items()
    }


def blamed(bad: Collection[Path], tested: Collection[Path]) -> list[tuple[Blame, tuple[str, ...]]]:
    """Return whom to name for bad paths: nodes of the same side together, all pairs together."""
    found = blame(bad, tested, share=NODE_SHARE, partly=False)
    groups: dict[str, list[Blame]] = defaultdict(list)
    for one in found:
        groups[one.side].append(one)
    together = []
    for side, some in groups.items():
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = tuple(node for one in some for node in one.nodes)
        together.append((Blame(some[0].side, paths, nodes), nodes if side != "pair" else ()))
    return together


def who(run: Run, one: Blame) -> str:
    """Return whose paths these are, to begin a title."""
    if one.nodes:
        names = listed(ordered(run, one.nodes))
        return {"inbound": f"paths to {names}", "outbound": f"paths from {names}"}.get(
            one.side, f"paths of {names}"
        )
    pairs = list(dict.fromkeys(tuple(sorted(path)) for path in one.paths))
    if len(pairs) * 2 == len(one.paths):
        return listed([f"{start}-{end}" for start, end in ordered_pairs(run, pairs)])
    return arrows(one.paths)


def ordered_pairs(run: Run, pairs: Collection[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return pairs in the order of the run."""
    place = {name: number for number, name in enumerate(run.expected)}
    sides = [sorted(pair, key=lambda name: (place.get(name, len(place)), name)) for pair in pairs]
    return sorted(((a, b) for a, b in sides), key=lambda p: (place.get(p[0], 0), p))
