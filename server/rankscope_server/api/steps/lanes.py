"""The lanes of the map: in which order ranks are shown, and which of them share a lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from rankscope_server.answers import capped
from rankscope_server.api.steps.schema import MapRow, Order
from rankscope_server.problems import Problem
from rankscope_server.text import plural, rank_list

Array = np.ndarray[Any, np.dtype[Any]]
ORDERS: tuple[str, ...] = get_args(Order)
MAX_LANES = 2_048
MAX_RANKS_SHOWN = 2_048  # of a lane
_NAMED = 2  # ranks in the label of a lane


@dataclass(frozen=True, slots=True)
class Ranks:
    """What an order can go by, one entry a rank."""

    hosts: list[str]
    stages: list[int]
    deviations: Array  # how much it deviates over the range; NaN: it has no data there
    # by order: the names of groups, and per rank a place in them, -1 for none
    groups: Mapping[str, tuple[Sequence[str], Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lanes:
    """All ranks in the order of the picture, cut into lanes."""

    ranks: Array
    starts: Array  # where in `ranks` each lane begins
    groups: list[str]  # per lane; empty where lanes are not grouped
    most_ranks: int  # of one lane

    @property
    def is_by_rank(self) -> bool:
        """Return whether ranks are in their own order."""
        return bool((np.diff(self.ranks) > 0).all())

    def parts(self) -> list[Array]:
        """Return the ranks of each lane."""
        return np.split(self.ranks, self.starts[1:]) if len(self.starts) else []


def choose_lanes(order: str, ranks: Ranks, most: int) -> Lanes:
    """Return at most `most` lanes, or one a group where there are more groups.

    Lanes never mix two groups. With `worst` the first half of the lanes hold one rank each.
    Raises Problem 422 for an order that is not known, or of more groups than there may be lanes.
    """
    if order not in ORDERS and order not in ranks.groups:
        use = ", ".join(dict.fromkeys((*ORDERS, *ranks.groups)))
        raise Problem(422, f"order {order[:40]!r} is not known", "order", f"use {use}")
    most = min(max(most, 1), MAX_LANES)
    numbers, names = _groups(order, ranks)
    if len(names) > MAX_LANES:
        raise Problem(
            422, f"{len(names):,} groups do not fit into {MAX_LANES:,} lanes", "order",
            "use worst or rank",
        )  # fmt: skip
    sizes = np.bincount(numbers, minlength=len(names)).tolist()
    if order == "worst":
        in_order = np.argsort(-ranks.deviations, kind="stable")  # NaN comes last
        alone = min(most // 2, sizes[0]) if len(numbers) > most else 0
        names = names[:1] * alone + names
        sizes = [1] * alone + [sizes[0] - alone, *sizes[1:]]
    else:
        in_order = np.argsort(numbers, kind="stable")
    size = _least_size(sizes, most)
    starts: list[int] = []
    groups: list[str] = []
    begin = 0
    for name, count in zip(names, sizes, strict=True):
        own = range(begin, begin + count, size)
        starts += own
        groups += [name] * len(own)
        begin += count
    return Lanes(in_order, np.array(starts, np.int64), groups, size)


def _groups(order: str, ranks: Ranks) -> tuple[Array, list[str]]:
    """Return the number of each rank's group, and the names of the groups."""
    keys: Sequence[Any]
    named: dict[Any, str]
    if order == "node":
        keys = ranks.hosts
        named = {host: host or "host not known" for host in dict.fromkeys(keys)}
    elif order == "stage":
        keys = ranks.stages
        known = sorted(set(keys), key=lambda stage: (stage < 0, stage))
        named = {stage: f"Stage {stage}" if stage >= 0 else "no stage" for stage in known}
    elif order in ranks.groups:
        names, codes = ranks.groups[order]
        keys = np.where(codes < 0, len(names), codes).tolist()
        named = dict(enumerate([*names, "no group"]))
    elif order == "worst":
        keys = np.isnan(ranks.deviations).tolist()
        named = {False: "", True: "no data"}
    else:
        keys = [0] * len(ranks.hosts)
        named = {0: ""}
    places = {key: place for place, key in enumerate(named)}
    return np.array([places[key] for key in keys], np.int64), list(named.values())


def _least_size(sizes: list[int], most: int) -> int:
    """Return the least number of ranks in a lane that leaves at most `most` lanes."""
    low, high = 1, max(sizes, default=1)
    while low < high:
        size = (low + high) // 2
        if sum(-(-count // size) for count in sizes) <= most:
            high = size
        else:
            low = size + 1
    return low


def rows_of(lanes: Lanes, ranks: Ranks) -> list[MapRow]:
    """Return what each lane is."""
    rows = []
    for own, group in zip(lanes.parts(), lanes.groups, strict=True):
        shown = own[:MAX_RANKS_SHOWN].tolist()
        rows.append(
            MapRow(
                label=label_of(own),
                ranks=shown,
                ranks_capped=capped(len(shown), len(own)),
                worst_rank=_worst_of(own, ranks.deviations),
                host=_host_text(own, ranks.hosts),
                group=group,
            )
        )
    return rows


def _worst_of(own: Array, deviations: Array) -> int | None:
    mine = deviations[own]
    return None if np.isnan(mine).all() else int(own[np.nanargmax(mine)])


def _is_range(own: Array) -> bool:
    return bool((np.diff(own) == 1).all())


def label_of(own: Array) -> str:
    """Return "Rank 5", "Ranks 8-15" or "Ranks 3, 11 and 6 more"."""
    if len(own) > 1 and _is_range(own):
        return f"Ranks {own[0]}-{own[-1]}"
    return rank_list(own.tolist(), _NAMED).capitalize()


def _host_text(own: Array, hosts: list[str]) -> str:
    found = list(dict.fromkeys(hosts[rank] for rank in own.tolist() if hosts[rank]))
    if len(found) < 2:
        return "".join(found)
    return f"{found[0]} to {found[-1]}" if _is_range(own) else plural(len(found), "host")
