"""What the store holds of an attempt, as the window that the hang detector looks at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.schema import RankEnded, RankRegistered, RankState
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows
from rankscope_server.diagnose.window import Window
from rankscope_server.store import tables

_COLUMNS = (*RANK_HEAD, "state")
_decode_state = msgspec.json.Decoder(RankState).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWindow(Window):
    """A window without records of steps: their states say whether ranks have ended one."""

    stepped: frozenset[int] = frozenset()
    backends: dict[str, str]  # of groups
    descriptions: dict[str, str]
    last_ns: int | None  # of the newest record of any rank
    num_ended: int

    def has_stepped(self, rank: int) -> bool:
        """Return whether a rank is beyond the first step of the attempt."""
        return rank in self.stepped


def window_of(
    connection: sa.Connection, run: sa.Row[Any], number: int, now_ns: int
) -> StoredWindow:
    """Return what is known of an attempt: states, groups, ends; each as it was last heard of."""
    rows = rank_rows(connection, run.run_id, number, _COLUMNS)
    attempt = tables.attempt
    known = connection.execute(
        sa.select(attempt).where(attempt.c.run_id == run.run_id, attempt.c.attempt == number)
    ).first()
    groups = tables.process_group
    defined = connection.execute(
        sa.select(groups).where(groups.c.run_id == run.run_id, groups.c.attempt == number)
    ).all()
    members = {row.group: tuple(json.loads(row.ranks)) for row in defined}
    states = {row.rank: _decode_state(row.state) for row in rows if row.state is not None}
    first = known.step_lo if known is not None else None
    return StoredWindow(
        run_id=run.run_id,
        attempt=number,
        now_ns=now_ns,
        world_size=(known.world_size if known is not None else 0) or run.world_size or len(rows),
        ranks={row.rank: _registered(row) for row in rows},
        states=states,
        heard_ns={row.rank: row.received_ns or 0 for row in rows},
        # by identity: the members of a group are one tuple for all of them
        groups={(rank, group): ranks for group, ranks in members.items() for rank in ranks},
        ended={row.rank: _ended(row) for row in rows if row.ended_ns is not None},
        stepped=frozenset(r for r, s in states.items() if first is not None and s.step > first),
        backends={row.group: row.backend for row in defined},
        descriptions={row.group: row.description for row in defined},
        last_ns=max((row.last_seen_ns or 0 for row in rows), default=0) or None,
        num_ended=sum(row.ended_ns is not None for row in rows),
    )


def _registered(row: Any) -> RankRegistered:
    return RankRegistered(
        attempt=row.attempt, rank=row.rank, time_ns=row.registered_ns or 0, world_size=0,
        local_rank=-1, local_world_size=0, node_rank=-1, host=row.host, pid=0, backend=row.backend,
    )  # fmt: skip


def _ended(row: Any) -> RankEnded:
    return RankEnded(
        attempt=row.attempt, rank=row.rank, time_ns=row.ended_ns, reason=row.end_reason,
        exit_code=row.exit_code, signal=row.exit_signal, last_step=row.step, detail=row.end_detail,
    )  # fmt: skip
