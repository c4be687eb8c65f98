"""The row of each rank: identity, where it is, how it ended; one read and one write a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.backends import is_of_device
from rankscope_server.ingest.chunks import RankSpan
from rankscope_server.store import tables
from rankscope_server.store.engine import upsert

_COLUMNS = [column.name for column in tables.rank.columns]
_REPLACED = tuple(column.name for column in tables.rank.columns if not column.primary_key)
_SELECT_RANKS = sa.select(tables.rank).where(
    tables.rank.c.run_id == sa.bindparam("run"),
    tables.rank.c.attempt == sa.bindparam("number"),
    tables.rank.c.rank.in_(sa.bindparam("ranks", expanding=True)),
)
_encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Seen:
    """What one batch shows of one attempt."""

    steps: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


def store_places(
    connection: sa.Connection, run_id: str, attempt: int, places: Mapping[int, Sequence[Any]]
) -> None:
    """Store what ranks do not say of themselves, by rank: stage, stages, microbatches, role."""
    table = tables.rank
    connection.execute(
        sa.update(table)
        .where(
            table.c.run_id == run_id, table.c.attempt == attempt,
            table.c.rank == sa.bindparam("of_rank"), table.c.num_stages == 0,
        )
        .values(
            stage=sa.bindparam("place"), num_stages=sa.bindparam("count"),
            num_microbatches=sa.bindparam("microbatches"),
            role=sa.case((sa.bindparam("part") != "", sa.bindparam("part")), else_=table.c.role),
        ),
        [
            {"of_rank": rank, "place": place, "count": count, "microbatches": microbatches,
             "part": role}
            for rank, (place, count, microbatches, role) in places.items()
        ],
    )  # fmt: skip


class RankRows:
    """Merges the records of a batch about ranks into their rows; `load` those rows first."""

    def __init__(self, connection: sa.Connection, run_id: str, now_ns: int) -> None:
        self._connection, self._run_id, self._now_ns = connection, run_id, now_ns
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}
        self._loaded: set[tuple[int, int]] = set()
        self._wanted: set[tuple[int, int]] = set()
        self.attempts: dict[int, Seen] = {}
        self.step = 0
        self.clean_step = 0  # last one of a rank that ended cleanly now

    def want(self, keys: set[tuple[int, int]]) -> None:
        """Let the next `load` read these, too."""
        self._wanted |= keys

    def load(self, keys: set[tuple[int, int]]) -> None:
        """Read the rows of (attempt, rank) at once, each once in a transaction."""
        if keys <= self._loaded:
            return
        keys, self._wanted = keys | self._wanted, set()
        ranks: dict[int, list[int]] = {}
        for attempt, rank in keys - self._loaded:
            ranks.setdefault(attempt, []).append(rank)
        for attempt, numbers in ranks.items():
            for at in range(0, len(numbers), 500):  # SQLite bounds the number of parameters
                chosen = {"run": self._run_id, "number": attempt, "ranks": numbers[at : at + 500]}
                for row in self._connection.execute(_SELECT_RANKS, chosen):
                    self._rows[attempt, row.rank] = dict(row._mapping)
        self._loaded |= keys

    def seen(self, attempt: int, rank: int, time_ns: int, step: int = 0, host: str = "") -> None:
        """Note that a rank was alive at `time_ns` in `step`."""
        row = self._row(attempt, rank)
        row["last_seen_ns"] = max(row["last_seen_ns"] or 0, time_ns)
        row["first_seen_ns"] = min(row["first_seen_ns"] or time_ns, time_ns)
        row["received_ns"] = self._now_ns
        row["host"] = row["host"] or host
        self.attempts.setdefault(attempt, Seen()).times.append(time_ns)
        self._reached(row, step)

    def seen_in(self, attempt: int, span: RankSpan, host: str) -> None:
        """Note what a chunk shows of a rank."""
        self.seen(attempt, span.rank, span.time_lo_ns, span.step_lo, host)
        row = self._rows[attempt, span.rank]
        row["last_seen_ns"] = max(row["last_seen_ns"], span.time_hi_ns)
        self.attempts[attempt].times.append(span.time_hi_ns)
        self._reached(row, span.step_hi)

    def _reached(self, row: dict[str, Any], step: int) -> None:
        """Note that a rank was in a step, unless it is the one that never came after its end.

        An end may come past what waited before it, of which a part is in that step.
        """
        if not step or (row["end_reason"] == "clean" and 0 < row["step"] == step - 1):
            return
        row["step"] = max(row["step"], step)
        self.step = max(self.step, step)
        self.attempts.setdefault(row["attempt"], Seen()).steps.append(step)

    def attempt_seen(self, attempt: int, time_ns: int) -> None:
        """Note a record that belongs to no rank."""
        self.attempts.setdefault(attempt, Seen()).times.append(time_ns)

    def register(self, record: schema.RankRegistered) -> None:
        """Take the identity of a rank."""
        row = self._row(record.attempt, record.rank)
        known_pid = row["pid"]
        for name in (
            "host", "node_rank", "local_rank", "local_world_size", "world_size", "pid", "backend",
        ):  # fmt: skip
            row[name] = getattr(record, name)
        # A place that analysis has found stays, unless the rank itself says one.
        if record.num_stages or record.pid != known_pid:
            for name in ("role", "stage", "num_stages", "num_microbatches", "schedule"):
                row[name] = getattr(record, name)
        row["sources"] = json.dumps(record.sources)
        row["registered_ns"] = record.time_ns
        # The same rank of the same attempt came up again: its earlier end is history. An end that
        # came past batches that waited is not.
        if row["ended_ns"] is not None and row["ended_ns"] < record.time_ns:
            row["ended_ns"] = row["end_reason"] = row["exit_code"] = row["exit_signal"] = None
            row["end_detail"] = ""

    def state(self, record: schema.RankState) -> None:
        """Take where a rank is, if it is news."""
        row = self._row(record.attempt, record.rank)
        if record.time_ns >= row["state_ns"]:
            row["state_ns"] = record.time_ns
            row["state"] = _encode_json(record).decode()

    def end(self, record: schema.RankEnded) -> bool:
        """Take how a rank ended, if it is news; return whether it is."""
        row = self._row(record.attempt, record.rank)
        known_ns, known = row["ended_ns"] or 0, row["end_reason"]
        is_older = record.time_ns < known_ns and (known != "lost" or record.reason == "lost")
        if is_older or (record.time_ns, record.reason) == (known_ns, known):
            return False
        row["ended_ns"] = record.time_ns
        row["end_reason"] = record.reason
        row["exit_code"] = record.exit_code
        row["exit_signal"] = record.signal
        row["end_detail"] = record.detail
        if record.reason == "clean" and row["step"] == record.last_step + 1:
            row["step"] = record.last_step  # the step that would have come next never did
            self.clean_step = max(self.clean_step, record.last_step)
        elif record.reason == "clean":
            self._reached(row, record.last_step)
        return True

    def is_on_device(self, attempt: int, rank: int) -> bool:
        """Return whether a rank's host only enqueues its collectives, and times its steps.

        Of an imported run the steps are those of the devices.
        """
        row = self._row(attempt, rank)
        return is_of_device(row["backend"]) and "steps" not in json.loads(row["sources"])

    def flush(self) -> None:
        """Write every row that was touched."""
        upsert(self._connection, tables.rank, list(self._rows.values()), _REPLACED)

    def _row(self, attempt: int, rank: int) -> dict[str, Any]:
        key = (attempt, rank)
        if key not in self._rows:
            self._rows[key] = self._new(attempt, rank)
        return self._rows[key]

    def _new(self, attempt: int, rank: int) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(_COLUMNS)
        row |= dict.fromkeys(("host", "role", "backend", "schedule", "end_detail"), "")
        row |= dict.fromkeys(("num_stages", "num_microbatches", "step", "state_ns"), 0)
        row |= {"run_id": self._run_id, "attempt": attempt, "rank": rank}
        row |= {"sources": "{}", "stage": -1}
        return row
