"""Who is to blame for bad paths: the fewest nodes that touch them all, or none.

A node's inbound, outbound or both sides are to blame where every path tested there is bad (or a
given share of them). One bad path is a pair. Where several answers are equally short, it is a tie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Path = tuple[str, str]  # (from, to)
Side = Literal["inbound", "outbound", "both", "pair", "tie", "everywhere"]
Suspect = tuple[str, Side]
MIN_PEERS = 2  # paths to one peer say nothing of the node itself
MAX_DEPTH, MAX_SUSPECTS = 6, 24  # of the exact search; above it takes the largest first


@dataclass(frozen=True)
class Blame:
    """Bad paths with one explanation. `nodes` is empty for a pair, a tie and everywhere."""

    side: Side
    paths: tuple[Path, ...]
    nodes: tuple[str, ...] = ()
    is_whole: bool = True  # every path tested on that side is bad; else only some


def blame(
    bad: Collection[Path], tested: Collection[Path], share: float = 1.0, partly: bool = True
) -> list[Blame]:
    """Return the explanations of all `bad` paths, in the order of the first path of each.

    `partly`: paths left over that start or end at one node are that node's as well, though other
    paths of that side are good: a firewall that names its sources.
    """
    if not bad:
        return []
    names = {name for path in tested for name in path}
    if set(tested) == set(bad) and len(names) > MIN_PEERS:
        return [_one_sided(bad) or Blame("everywhere", tuple(bad))]
    whole = _sides(bad, tested, share)
    covered = {path for paths in whole.values() for path in paths}
    found = []
    for part in _parts(covered, whole):
        found += _explained(part, whole)
    left = [path for path in bad if path not in covered]
    if partly:
        stars, left = _stars(left)
        found += stars
    found += [Blame("pair", paths) for paths in _pairs(left)]
    order = {path: place for place, path in enumerate(bad)}
    return sorted(found, key=lambda one: min(order[path] for path in one.paths))


def _one_sided(bad: Collection[Path]) -> Blame | None:
    """Return the one node at which all paths end, or start, if nothing else was tested."""
    sides: tuple[tuple[int, Side], ...] = ((1, "inbound"), (0, "outbound"))
    for at, side in sides:
        ends = {path[at] for path in bad}
        if len(ends) == 1:
            return Blame(side, tuple(bad), tuple(ends))
    return None


def _peers(paths: Iterable[Path]) -> dict[str, set[str]]:
    peers: dict[str, set[str]] = defaultdict(set)
    for start, end in paths:
        peers[start].add(end)
        peers[end].add(start)
    return peers


def _sides(
    bad: Collection[Path], tested: Collection[Path], share: float
) -> dict[Suspect, frozenset[Path]]:
    """Return the bad paths of each side of a node that is bad as a whole."""
    totals: dict[Suspect, int] = defaultdict(int)
    for path in tested:
        for suspect in _touched(path):
            totals[suspect] += 1
    hits: dict[Suspect, set[Path]] = defaultdict(set)
    for path in bad:
        for suspect in _touched(path):
            hits[suspect].add(path)
    found = {
        suspect: frozenset(paths)
        for suspect, paths in sorted(hits.items())
        if len(paths) >= share * totals[suspect] and len(_peers(paths)) > MIN_PEERS
    }
    for name, side in list(found):
        if side == "both":
            one_way: tuple[Suspect, ...] = ((name, "inbound"), (name, "outbound"))
            parts = [part for part in one_way if part in found]
            narrow = any(found[part] == found[name, side] for part in parts)
            for part in [(name, side)] if narrow else parts:
                del found[part]  # the narrower word says it, or the wider one says both
    return found


def _touched(path: Path) -> tuple[Suspect, ...]:
    start, end = path
    return ((end, "inbound"), (start, "outbound"), (start, "both"), (end, "both"))


def _parts(
    paths: Collection[Path], whole: dict[Suspect, frozenset[Path]]
) -> Iterator[frozenset[Path]]:
    """Yield paths that share suspects: what lies apart is explained apart."""
    left = set(paths)
    while left:
        part: set[Path] = set()
        asked: set[Suspect] = set()
        fresh = {next(iter(left))}
        while fresh:
            part |= fresh
            suspects = {s for path in fresh for s in _touched(path) if s in whole} - asked
            asked |= suspects
            fresh = {path for suspect in suspects for path in whole[suspect]} - part
        left -= part
        yield frozenset(part)


def _explained(part: frozenset[Path], whole: dict[Suspect, frozenset[Path]]) -> list[Blame]:
    chosen, rest = _forced(part, whole)
    covers = _covers(rest, whole) if rest else [frozenset()]
    sure = chosen | frozenset.intersection(*covers)
    found = []
    for name, side in sorted(sure):
        found.append(Blame(side, tuple(sorted(whole[name, side] & part)), (name,)))
    open_paths = rest - {path for suspect in sure for path in whole[suspect]}
    if open_paths:
        found.append(Blame("tie", tuple(sorted(open_paths))))
    return found


def _forced(
    part: frozenset[Path], whole: dict[Suspect, frozenset[Path]]
) -> tuple[frozenset[Suspect], frozenset[Path]]:
    """Take what is the only explanation of some path; return it and the paths still open."""
    only = set()
    for path in part:
        suspects = [s for s in _touched(path) if s in whole]
        if len(suspects) == 1:
            only.add(suspects[0])
    done = {path for suspect in only for path in whole[suspect]}
    return frozenset(only), part - done


def _covers(
    paths: frozenset[Path], whole: dict[Suspect, frozenset[Path]]
) -> list[frozenset[Suspect]]:
    """Return all smallest sets of suspects that explain `paths`; where there are many, one."""
    sides = {suspect: some & paths for suspect, some in whole.items() if some & paths}
    if len(sides) <= MAX_SUSPECTS:
        for depth in range(1, MAX_DEPTH + 1):
            found = set(_search(paths, sides, depth, frozenset()))
            if found:
                return sorted(found, key=sorted)
    return [frozenset(suspects[0] for suspects, _ in _largest_first(sides))]


def _largest_first(
    sides: Mapping[Suspect, Collection[Path]], least: int = 1
) -> Iterator[tuple[list[Suspect], list[Path]]]:
    """Yield suspects and their paths, most paths first, until fewer than `least` are left.

    Of several with as many paths, those that share some with the first come together.
    """
    left = {suspect: set(paths) for suspect, paths in sides.items()}
    while left:
        most = max(map(len, left.values()))
        if most < least:
            return
        first, *others = [suspect for suspect, paths in left.items() if len(paths) == most]
        equal = [first, *(s for s in others if not left[s].isdisjoint(left[first]))]
        mine = {path for suspect in equal for path in left[suspect]}
        yield equal, sorted(mine)
        for suspect in {s for path in mine for s in _touched(path) if s in left}:
            left[suspect] -= mine
            if not left[suspect]:
                del left[suspect]


def _search(
    left: frozenset[Path], whole: dict[Suspect, frozenset[Path]], depth: int,
    chosen: frozenset[Suspect],
) -> Iterator[frozenset[Suspect]]:  # fmt: skip
    if not left:
        yield chosen
    elif depth:
        for suspect in _touched(min(left)):
            if suspect in whole:
                rest = left - whole[suspect]
                yield from _search(rest, whole, depth - 1, chosen | {suspect})


def _stars(paths: list[Path]) -> tuple[list[Blame], list[Path]]:
    """Take the paths that start or end at one node, the largest number first."""
    sides: dict[Suspect, list[Path]] = defaultdict(list)
    for path in paths:
        sides[path[1], "inbound"].append(path)
        sides[path[0], "outbound"].append(path)
    stars: list[Blame] = []
    for (first, *others), mine in _largest_first(sides, MIN_PEERS):
        if others:
            stars.append(Blame("tie", tuple(mine), is_whole=False))
        else:
            stars.append(Blame(first[1], tuple(mine), (first[0],), is_whole=False))
    taken = {path for star in stars for path in star.paths}
    return stars, [path for path in paths if path not in taken]


def _pairs(paths: Iterable[Path]) -> Iterator[tuple[Path, ...]]:
    both: dict[frozenset[str], list[Path]] = defaultdict(list)
    for path in paths:
        both[frozenset(path)].append(path)
    for some in both.values():
        yield tuple(some)
