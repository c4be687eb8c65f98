"""The kinds of data that retention distinguishes, and the tables that hold them.

Every table of the store is either in a part here, found by its column `run_id`, or named in
`NOT_OF_A_RUN`: `tests/server/test_retention.py` holds the list, so that a new table is decided on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import sqlalchemy as sa

from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope_server.store import tables

RawKind: TypeAlias = Literal["collectives", "steps", "samples", "logs", "events", "numbers"]
Kind: TypeAlias = Literal["collectives", "steps", "samples", "logs", "events", "numbers", "rest"]
RAW_KINDS: tuple[RawKind, ...] = get_args(RawKind)
KINDS: tuple[Kind, ...] = get_args(Kind)
LABELS: dict[Kind, str] = {
    "collectives": "single collectives",
    "steps": "single steps",
    "samples": "samples of machines",
    "logs": "log lines",
    "events": "events, stacks, traces",
    "numbers": "numbers of training",
    "rest": "summaries, findings",
}
# They have a life of their own: preflights are kept by number, these rows outlive their run;
# lines go with their block.
NOT_OF_A_RUN = (
    tables.preflight, tables.preflight_node, tables.deletion, tables.received_mark,
    tables.size_counted, tables.alert_channel, tables.alert_rule, tables.token, tables.session,
    tables.oidc_login, tables.audit, tables.saved_search, tables.saved_view, tables.log_lines,
    tables.server, tables.object_owner, tables.dropped_object,
)  # fmt: skip
# Tables without `run_id`: their rows belong to a row of another one.
_OWNERS = {
    tables.finding_event: (tables.finding_event.c.finding_id, tables.finding),
    tables.command_rank: (tables.command_rank.c.command_id, tables.command),
    tables.trace_part: (tables.trace_part.c.command_id, tables.command),
    tables.alert_delivery: (tables.alert_delivery.c.alert_id, tables.alert),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """What came before a time: the largest ids by column of `received_mark`, 0 for nothing."""

    before_ns: int
    ids: Mapping[str, int]


@dataclass(frozen=True)
class Part:
    """Rows of one table that are of one kind."""

    table: sa.Table
    mark: str = ""  # the column of `received_mark` that says how old a row is
    kinds: frozenset[str] | None = None  # of chunks, and of a journal
    by_age: sa.ColumnElement[Any] | None = None  # an index has the rows of a run in this order

    def of_run(self, run_id: str) -> sa.ColumnElement[bool]:
        """Return the condition for the rows of a run."""
        return self._of_kind() & self._owned(lambda column: column == run_id)

    def received_by(self, cut: Cut) -> sa.ColumnElement[bool]:
        """Return the condition for rows that came no later than a cut.

        A block that still takes log lines is as new as the news of its run.
        """
        aged: sa.ColumnElement[bool] = self.id <= cut.ids[self.mark]
        if self.table is not tables.log_block:
            return aged
        run, block = tables.run.c, tables.log_block.c
        quiet = sa.select(run.run_id).where(run.received_ns <= cut.before_ns)
        return aged & ((block.sealed != 0) | block.run_id.in_(quiet))

    @property
    def id(self) -> sa.ColumnElement[int]:
        """Return the column whose numbers grow with time: of the owner, the row or its batch."""
        owner = _OWNERS.get(self.table)
        columns = self.table.c
        column: sa.ColumnElement[int] = (
            owner[0] if owner else columns.id if "id" in columns else columns.batch_id
        )
        return column

    def run_id(self) -> sa.ColumnElement[str]:
        """Return an expression for the run of a row."""
        owner = _OWNERS.get(self.table)
        if owner is None:
            return self.table.c.run_id
        column, parent = owner
        return sa.select(parent.c.run_id).where(parent.c.id == column).scalar_subquery()

    def _owned(self, condition: Any) -> sa.ColumnElement[bool]:
        owner = _OWNERS.get(self.table)
        if owner is None:
            found: sa.ColumnElement[bool] = condition(self.table.c.run_id)
            return found
        column, parent = owner
        return column.in_(sa.select(parent.c.id).where(condition(parent.c.run_id)))

    def _of_kind(self) -> sa.ColumnElement[bool]:
        return self.of_kind() if self.kinds is not None else sa.true()

    def of_kind(self) -> sa.ColumnElement[bool]:
        """Return the condition for rows of this kind, whichever run's."""
        if self.kinds is None:
            return sa.true()
        return self.table.c.kind.in_(sorted(self.kinds))

    def num_bytes(self) -> sa.ColumnElement[int]:
        """Return an expression for the bytes of content of a row, without indexes."""
        return content_bytes(self.table)


def _journal(kind: RawKind) -> Part:
    """Return what a restarted server would read of a kind."""
    return Part(tables.journal, "batch_id", frozenset({kind}), tables.journal.c.batch_id)


_CHUNK = tables.chunk
_BY_TIME = _CHUNK.c.time_hi_ns
RAW_PARTS: dict[RawKind, tuple[Part, ...]] = {
    "collectives": (Part(_CHUNK, "chunk_id", frozenset({"collectives"}), _BY_TIME),),
    "steps": (Part(_CHUNK, "chunk_id", frozenset({"steps"}), _BY_TIME),),
    "samples": (Part(_CHUNK, "chunk_id", SAMPLE_KINDS, _BY_TIME),),
    "logs": (Part(tables.log_block, "log_block_id", None, tables.log_block.c.time_hi_ns),),
    "events": (
        Part(tables.event, "event_id", None, tables.event.c.id),
        Part(tables.stacks, "stacks_id"),
        Part(tables.trace_part, "command_id"),
        _journal("events"),
    ),
    "numbers": (
        Part(tables.metric, "batch_id", None, tables.metric.c.batch_id),
        _journal("numbers"),
    ),
}
_RAW_TABLES = {part.table for parts in RAW_PARTS.values() for part in parts}


def rest_tables() -> tuple[sa.Table, ...]:
    """Return the tables that go only with their whole run; children before their parents."""
    children = [table for table in _OWNERS if table not in _RAW_TABLES]
    others = [
        table
        for table in tables.metadata.sorted_tables
        if "run_id" in table.c and table not in _RAW_TABLES and table not in NOT_OF_A_RUN
        and table not in children
    ]  # fmt: skip
    # `run` goes first of all, in the transaction that begins the deletion; sizes go last.
    last = (tables.stored_size,)
    middle = [table for table in others if table is not tables.run and table not in last]
    return (*children, *middle, *last)


def parts_of_run() -> tuple[tuple[Kind, Part], ...]:
    """Return everything that belongs to a run, in the order in which it is removed.

    Log lines first: they are what a search over all runs would still find.
    """
    first: list[tuple[Kind, Part]] = [("logs", part) for part in RAW_PARTS["logs"]]
    for kind in RAW_KINDS:
        if kind != "logs":
            first += [(kind, part) for part in RAW_PARTS[kind]]
    # chunks of a kind that no setting names, if there will ever be one
    first.append(("rest", Part(_CHUNK)))
    return (*first, *(("rest", Part(table)) for table in rest_tables()))


def content_bytes(table: sa.Table) -> sa.ColumnElement[int]:
    """Return an expression for the bytes of content of a row: texts, blobs, 8 for each number."""
    total: sa.ColumnElement[int] = sa.literal_column("0", sa.BigInteger)
    numbers = 0
    # its lines have a row of their own, its data is in an object: they go with it
    if table in (tables.log_block, tables.chunk):
        total = total + table.c.num_bytes
    for column in table.c:
        if isinstance(column.type, sa.LargeBinary | sa.String):
            total = total + sa.func.coalesce(sa.func.length(column), 0)
        else:
            numbers += 8
    return total + sa.literal_column(str(numbers), sa.BigInteger)
