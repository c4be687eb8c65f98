"""Where the members of each process group are, equal ones as one row. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import get_args

from rankscope.wire.backends import is_of_device
from rankscope.wire.group_state import exchanges_of
from rankscope.wire.schema import GroupState
from rankscope_server.answers import capped, to_ms
from rankscope_server.api.hang.ranges import rank_set
from rankscope_server.api.hang.schema import GroupPlaces, PlaceRow, Standing
from rankscope_server.api.hang.standings import Standings, Waits
from rankscope_server.api.hang.stored import StoredWindow
from rankscope_server.text import group_text

MAX_GROUPS = 40
MAX_ROWS = 60
_ORDER: tuple[Standing, ...] = get_args(Standing)
_FIRST = _ORDER.index("waiting")  # those before it do not come; the others go by how far they are
_Key = tuple[Standing, int | None, int | None, str, int, str, str]


def places(
    window: StoredWindow, waits: Waits, standings: Standings, wanted: str
) -> tuple[list[GroupPlaces], int, int]:
    """Return groups, how many there are, and in how many of them no member waits.

    With `wanted` only the group of that name; else that which keeps all waiting comes first, then
    those in which most wait.
    """
    members: dict[str, tuple[int, ...]] = {}
    for (_, group), ranks in window.groups.items():
        members.setdefault(group, ranks)
    positions = {
        (rank, place.group): place
        for rank, state in window.states.items() for place in state.groups
    }  # fmt: skip
    for rank, group in positions:
        members.setdefault(group, ())
        if (rank, group) not in window.groups:  # it says that it is in it, no definition does
            members[group] = tuple(sorted({*members[group], rank}))
    waiting: dict[str, int] = defaultdict(int)
    for operation in waits.operations.values():
        waiting[operation.group] += 1
    busy = {*waiting, *(group for _, group in waits.lacks)}
    roots = set(waits.roots)
    cause = {group for (rank, group), one in waits.lacks.items() if rank in roots and one.sequence}

    def place(group: str) -> tuple[bool, int, bool, int, str]:
        return (
            group not in cause, -waiting[group], group not in busy, -len(members[group]), group,
        )  # fmt: skip

    shown = [wanted] if wanted in members else [] if wanted else sorted(members, key=place)
    found = [
        _group(window, waits, standings, group, members[group], positions, waiting[group])
        for group in shown[:MAX_GROUPS]
    ]
    return found, len(members), len(members.keys() - busy)


def _group(
    window: StoredWindow, waits: Waits, standings: Standings, group: str, ranks: Sequence[int],
    positions: dict[tuple[int, str], GroupState], num_waiting: int,
) -> GroupPlaces:  # fmt: skip
    backend = window.backends.get(group, "")
    alike: dict[_Key, list[int]] = defaultdict(list)
    for rank in ranks:
        place = positions.get((rank, group))
        alike[_key(standings.in_group(rank, group), place, backend)].append(rank)
    order = sorted(alike, key=_lag)
    rows = [_row(window, waits, group, key, alike[key], positions) for key in order[:MAX_ROWS]]
    began = [place.issued for rank in ranks if (place := positions.get((rank, group)))]
    return GroupPlaces(
        group=group,
        text=group_text(list(ranks), window.world_size, window.descriptions.get(group, "")),
        backend=backend,
        num_ranks=len(ranks),
        num_waiting=num_waiting,
        most_began=max(began, default=None),
        rows=rows,
        capped=capped(len(rows), len(alike)),
    )


def _lag(key: _Key) -> tuple[int, int, int, int]:
    standing, began, ended, *_ = key
    place = _ORDER.index(standing)
    return min(place, _FIRST), began or 0, ended or 0, place


def _key(standing: Standing, place: GroupState | None, backend: str) -> _Key:
    if place is None:
        return standing, None, None, "", 0, "", ""
    ends_are_known = place.ended or place.ends_are_known or not is_of_device(backend)
    ended = place.ended if ends_are_known else None
    is_open = bool(place.open_sequence) and (ended is None or place.open_sequence > ended)
    return (
        standing, place.issued, ended, place.operation,
        place.open_sequence if is_open else 0, place.open_operation if is_open else "",
        place.p2p_operation,
    )  # fmt: skip


def _row(
    window: StoredWindow, waits: Waits, group: str, key: _Key, ranks: list[int],
    positions: dict[tuple[int, str], GroupState],
) -> PlaceRow:  # fmt: skip
    standing, began, ended, operation, open_sequence, open_operation, exchange = key
    found = [place for rank in ranks if (place := positions.get((rank, group)))]
    sites = {place.open_call_site or place.call_site for place in found} - {""}
    inside = ranks if standing == "waiting" else []
    since = [at for rank in inside if (at := waits.since_ns.get(rank))]
    waited = [waits.waited_seconds[rank] for rank in inside if rank in waits.waited_seconds]
    peers = sorted({place.p2p_peer for place in found if place.p2p_operation})
    with_peer = f" with rank {peers[0]}" if len(peers) == 1 and peers[0] >= 0 else ""
    return PlaceRow(
        standing=standing,
        ranks=rank_set(window, ranks),
        began=began,
        ended=ended,
        operation=operation,
        open_sequence=open_sequence or None,
        open_operation=open_operation,
        since_ms=to_ms(min(since, default=None)),
        waited_seconds=max(waited, default=None),
        call_site=sites.pop() if len(sites) == 1 else "",
        exchange=f"{exchange}{with_peer}" if exchange else "",
        exchanges=max(map(exchanges_of, found), default=0),
    )
