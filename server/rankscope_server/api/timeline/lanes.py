"""Which ranks a timeline shows: all where they fit, else those that matter most, each with why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rankscope_server.api.selection.words import ranges_text
from rankscope_server.api.steps.queries import known as or_none
from rankscope_server.api.timeline.reading import Recorded
from rankscope_server.api.timeline.schema import FoldedHost
from rankscope_server.findings.statistics import middle
from rankscope_server.problems import Problem

Array = np.ndarray[Any, np.dtype[Any]]
MAX_LANES = 256
MAX_FOLDED = 1_024  # hosts
LANES = 32  # unless more are asked for
_OF_PATH, _OF_MISSING = 6, 4


def parse_ranks(text: str, height: int) -> list[int]:
    """Return the ranks of "5,64-67", in this order. Raises Problem 422."""
    found: dict[int, None] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        low, _, high = part.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()) or len(part) > 20:
            raise Problem(422, f"{part[:40]!r} is no rank", "ranks", "write ranks as 5,64-67")
        first, last = int(low), int(high or low)
        if first > last or first >= height:
            raise Problem(
                422, f"there are no ranks {part[:40]}", "ranks", f"ranks are 0 to {height - 1}"
            )
        for rank in range(first, min(last, height - 1) + 1):
            found[rank] = None
    return list(found)


def choose_lanes(
    recorded: Recorded,
    own_ms: Array,
    named: Sequence[int],
    also: int | None,
    on_path: Iterable[int],
    most: int,
) -> list[tuple[int, str]]:
    """Return ranks with why they are shown, at most so many."""
    height = recorded.height
    stages = [place.stage for place in recorded.places]
    if height <= most:
        order = sorted(range(height), key=lambda rank: (stages[rank], rank))
        return [(rank, "named above" if rank in named else "") for rank in order]
    found: dict[int, str] = {} if also is None or also >= height else {also: "selected"}
    found |= dict.fromkeys(named, "named above")
    for rank in list(on_path)[:_OF_PATH]:
        found.setdefault(rank, "on the critical path")
    known = np.flatnonzero(~np.isnan(own_ms))
    by_work = known[np.argsort(-own_ms[known], kind="stable")]
    if len(by_work):
        found.setdefault(int(by_work[len(by_work) // 2]), "median rank")
    missing = np.flatnonzero(np.isnan(recorded.cells["step"]))[:_OF_MISSING]
    for rank in missing.tolist():
        found.setdefault(rank, "no data")
    hosts = recorded.hosts
    sizes: dict[str, int] = {}
    for host in hosts:
        sizes[host] = sizes.get(host, 0) + 1
    seen: set[str] = set()
    for rank in by_work.tolist():  # the first of a host is its worst
        if hosts[rank] not in seen:
            seen.add(hosts[rank])
            if sizes[hosts[rank]] > 1:
                found.setdefault(rank, f"worst of {hosts[rank]}")
    for rank in by_work.tolist():
        found.setdefault(rank, "next by self time")
    return list(found.items())[:most]


def folded(
    hosts: Sequence[str], own_ms: Array, blocked_ms: Array, shown: Iterable[int]
) -> list[FoldedHost]:
    """Return the ranks that are not shown by their host, that with the longest self time first.

    `own_ms` and `blocked_ms` are of each rank, NaN where it is not known.
    """
    left = set(range(len(hosts))) - set(shown)
    of_host: dict[str, list[int]] = {}
    for rank in sorted(left):
        of_host.setdefault(hosts[rank], []).append(rank)
    found = [_folded(host, ranks, own_ms, blocked_ms) for host, ranks in of_host.items()]
    return sorted(found, key=lambda one: -1.0 if one.most_ms is None else one.most_ms, reverse=True)


def _folded(host: str, ranks: list[int], own_ms: Array, blocked_ms: Array) -> FoldedHost:
    own = own_ms[ranks]
    known = own[~np.isnan(own)]
    is_any = len(known) > 0
    return FoldedHost(
        host=host,
        ranks=ranges_text(np.isin(np.arange(ranks[-1] + 1), ranks)),
        num_ranks=len(ranks),
        num_known=len(known),
        worst_rank=ranks[int(np.nanargmax(own))] if is_any else None,
        least_ms=float(known.min()) if is_any else None,
        median_ms=float(np.median(known)) if is_any else None,
        most_ms=float(known.max()) if is_any else None,
        blocked_ms=or_none(middle(blocked_ms[ranks])),
    )
