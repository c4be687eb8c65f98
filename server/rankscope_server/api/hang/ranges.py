"""Ranks as text that people read and type: "0-16, 18-31". Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankscope_server.api.hang.schema import RankSet
from rankscope_server.diagnose.window import Window

MAX_RANGES = 24
MAX_SOME, MAX_HOSTS = 8, 6


def ranges_text(ranks: Sequence[int]) -> str:
    """Return ordered ranks as ranges; of very many, how many more there are."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in ranges[:MAX_RANGES])
    rest = sum(hi - lo + 1 for lo, hi in ranges[MAX_RANGES:])
    return f"{shown} and {rest:,} more" if rest else shown


def rank_set(window: Window, ranks: Iterable[int]) -> RankSet:
    """Return some ranks with their hosts."""
    ordered = sorted(ranks)
    hosts = dict.fromkeys(host for rank in ordered if (host := window.host(rank)))
    return RankSet(
        count=len(ordered), text=ranges_text(ordered), some=ordered[:MAX_SOME],
        hosts=list(hosts)[:MAX_HOSTS], num_hosts=len(hosts),
    )  # fmt: skip
