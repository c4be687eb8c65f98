"""Runs in a search: which ones `run:` and `project:` may mean, and whose lines `group:` is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rankscope_server.search.tree import (
    EVERYTHING,
    And,
    Names,
    Node,
    Not,
    Numbers,
    OfRuns,
    Or,
    QueryError,
)
from rankscope_server.store import tables
from rankscope_server.store.line_filter import is_named
from rankscope_server.store.projects import of_project

MAX_GROUPS = 200  # unlike ones of one name: each is looked at by itself
_ESCAPE = "~"


def needed(node: Node) -> list[Node]:
    """Return leaves that every line must match."""
    if isinstance(node, And):
        return [leaf for child in node.nodes for leaf in needed(child)]
    return [node]


def in_visible_runs(
    run_id: sa.Column[str], node: Node, project: str | None
) -> list[sa.ColumnElement[bool]]:
    """Return conditions that leave what a query may find in the runs of a project, and a bit more.

    What a deleted run has left is removed a little later than the run, so it is left out here.
    """
    table = tables.run.c
    where = of_project(tables.run, project)
    for leaf in needed(node):
        if isinstance(leaf, Names) and leaf.field == "run":
            where.append(sa.or_(_like(table.run_id, leaf), _like(table.name, leaf)))
        elif isinstance(leaf, Names) and leaf.field == "project":
            where.append(_like(table.project, leaf))
    conditions: list[sa.ColumnElement[bool]] = [run_id.not_in(sa.select(tables.deletion.c.run_id))]
    # Only where it narrows: without it blocks come in the order of time as they are stored.
    return [*conditions, run_id.in_(sa.select(table.run_id).where(*where))] if where else conditions


def _like(column: sa.Column[str], node: Names) -> sa.ColumnElement[bool]:
    """Return a condition that every text meets which has one of the names, and others may."""
    patterns = (
        re.sub(r"[^\x00-\x7f*]|\*", "%", name.replace(_ESCAPE, 2 * _ESCAPE)) for name in node.names
    )  # databases know no other letters' capitals
    return sa.or_(*(column.ilike(pattern, escape=_ESCAPE) for pattern in patterns))


class Groups:
    """Puts the ranks of process groups in place of their names, in one run or in all."""

    def __init__(self, connection: sa.Connection, run_id: str | None, project: str | None) -> None:
        self._connection, self._run_id, self._project = connection, run_id, project

    def resolved(self, node: Node, whole: Node) -> Node:
        """Return the tree without names of groups; `whole` narrows the runs that are looked at.

        Raises QueryError where no run has such a group.
        """
        if isinstance(node, And | Or):
            return type(node)(tuple(self.resolved(child, whole) for child in node.nodes))
        if isinstance(node, Not):
            return Not(self.resolved(node.node, whole))
        if isinstance(node, Names) and node.field == "group":
            return self._members(node, whole)
        return node

    def _members(self, node: Names, whole: Node) -> Node:
        runs_of: dict[tuple[int, str], set[str]] = {}
        for row in self._rows(node, whole):
            runs_of.setdefault((row.attempt, row.ranks), set()).add(row.run_id)
        if not runs_of and not self._rows(node, EVERYTHING):
            raise self._unknown(node)
        if len(runs_of) > MAX_GROUPS:
            raise QueryError(
                f"{len(runs_of):,} unlike groups have this name", node.place,
                "name fewer runs beside it, as run:ddp-*",
            )  # fmt: skip
        return Or(tuple(
            And((
                *([OfRuns(frozenset(runs))] if self._run_id is None else []),
                Numbers("attempt", ((attempt, attempt),)),
                Numbers("rank", _as_ranges(json.loads(ranks))),
            ))
            for (attempt, ranks), runs in runs_of.items()
        ))  # fmt: skip

    def _rows(self, node: Names, whole: Node) -> list[Any]:
        table = tables.process_group.c
        columns = table.run_id, table.attempt, table.group, table.description, table.ranks
        statement = sa.select(*columns).where(
            *(
                [table.run_id == self._run_id]
                if self._run_id is not None
                else in_visible_runs(table.run_id, whole, self._project)
            ),
            sa.or_(_like(table.group, node), _like(table.description, node)),
        )
        return [
            row
            for row in self._connection.execute(statement)
            if is_named(node, row.group) or (row.description and is_named(node, row.description))
        ]

    def _unknown(self, node: Names) -> QueryError:
        name = f"{node.names[0][:60]!r}"
        if self._run_id is None:
            return QueryError(
                f"no run has a group {name}", node.place,
                "use another name, or rank: and host:",
            )  # fmt: skip
        table = tables.process_group.c
        groups = self._connection.scalars(
            sa.select(table.group).where(table.run_id == self._run_id).order_by(table.group)
        )
        known = ", ".join(list(dict.fromkeys(groups))[:12]) or "it has none"
        return QueryError(f"the run has no group {name}", node.place, known)


def _as_ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)
