"""The stacks that ranks wrote in a hang, read from the store: side by side, and to be merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from rankscope_server.api.hang import icicle
from rankscope_server.api.hang.schema import Frame, Icicle, RankStack
from rankscope_server.api.hang.standings import Standings
from rankscope_server.api.hang.stored import StoredWindow
from rankscope_server.diagnose.hang.wait_graph import activity_ns
from rankscope_server.store import tables

MAX_MERGED = 1_024  # ranks whose stacks are merged
MAX_TEXT = 20_000  # of one dump, its end
_BEFORE_NS = 120 * 10**9  # the collector takes the first ones before a finding opens


@dataclass(frozen=True, slots=True)
class Dump:
    """The newest stacks of a rank."""

    rank: int
    time_ns: int
    reason: str
    text: str


def newest(
    connection: sa.Connection, run_id: str, attempt: int, since_ms: float | None
) -> dict[int, int]:
    """Return for each rank the id of its newest stacks, of those since a finding began."""
    table = tables.stacks.c
    where = [table.run_id == run_id, table.attempt == attempt]
    if since_ms is not None:
        where.append(table.time_ns >= int(since_ms * 1e6) - _BEFORE_NS)
    found = sa.select(table.rank, sa.func.max(table.id)).where(*where).group_by(table.rank)
    return {rank: int(number) for rank, number in connection.execute(found)}


def read(connection: sa.Connection, ids: Collection[int]) -> dict[int, Dump]:
    """Return dumps by rank."""
    table = tables.stacks.c
    rows = connection.execute(
        sa.select(table.rank, table.time_ns, table.reason, table.text).where(table.id.in_(ids))
    )
    return {row.rank: Dump(row.rank, row.time_ns, row.reason, row.text) for row in rows}


def to_merge(known: Mapping[int, int], first: Sequence[int]) -> list[int]:
    """Return the ids of the stacks to merge: of very many ranks, those that say most first."""
    order = [rank for rank in dict.fromkeys((*first, *sorted(known))) if rank in known]
    return [known[rank] for rank in order[:MAX_MERGED]]


def side_by_side(
    window: StoredWindow,
    standings: Standings,
    roots: Collection[int],
    dumps: Mapping[int, Dump],
    frames: Mapping[int, list[Frame]],
    ranks: Sequence[int],
    since_ms: float | None,
) -> list[RankStack]:
    """Return the stacks of some ranks, with how many frames all of them share.

    `since_ms` is when what they are in began, where a finding says so.
    """
    shared = icicle.num_shared([frames[rank] for rank in ranks if frames.get(rank)])
    return [
        RankStack(
            rank=rank,
            host=window.host(rank),
            standing=standings.of(rank),
            is_root=rank in roots,
            time_ms=None if dump is None else dump.time_ns / 1e6,
            reason="" if dump is None else dump.reason,
            frames=frames.get(rank, []),
            num_shared=min(shared, len(frames.get(rank, []))),
            text="" if dump is None else dump.text[-MAX_TEXT:],
            note=_note(window, rank, dump, bool(frames.get(rank)), since_ms),
        )
        for rank in ranks
        for dump in (dumps.get(rank),)
    ]


def _note(
    window: StoredWindow, rank: int, dump: Dump | None, has_frames: bool, since_ms: float | None
) -> str:
    """Return what a reader has to know before they believe a stack."""
    if dump is None:
        return "No stacks of it were taken"
    if not has_frames:
        return "Its stacks hold no Python frame"
    state = window.states.get(rank)
    moved_ms = 0.0 if state is None else activity_ns(state) / 1e6
    # a rank that gave up, or was ended, moved once more: what counts is the time of the hang
    begun_ms = moved_ms if since_ms is None or rank not in window.ended else since_ms
    if dump.time_ns / 1e6 < begun_ms:
        return "Taken before it last moved: it may be elsewhere now"
    return ""


def merged(
    window: StoredWindow,
    roots: frozenset[int],
    dumps: Mapping[int, Dump],
    frames: Mapping[int, list[Frame]],
    num_with_stacks: int,
) -> Icicle:
    """Return the stacks of all ranks that wrote some, merged."""
    times = {rank: dump.time_ns / 1e6 for rank, dump in dumps.items()}
    known = {rank: found for rank, found in frames.items() if found}
    return icicle.merged(window, known, times, roots, num_with_stacks)
