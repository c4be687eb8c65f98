"""What is known of each rank: its place, its groups, its environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.groups.stored import groups_of
from rankscope_server.api.kept import Kept
from rankscope_server.api.runs.environment import facts_of, stored_facts
from rankscope_server.api.runs.queries import rank_rows
from rankscope_server.api.selection.common import Array, Column, Member
from rankscope_server.api.selection.schema import Kind
from rankscope_server.observe.environment_rules import (
    is_near,
    is_unknown,
    is_variable,
    level_of,
    normal,
)
from rankscope_server.store import tables
from rankscope_server.text import group_text

_COLUMNS = ("rank", "host", "stage", "role", "local_rank", "backend")


@dataclass(frozen=True, slots=True)
class Registered:
    """The ranks of an attempt: what each registered as, how many there are, and their places."""

    rows: dict[int, Any]
    height: int
    places: list[Column]


_HOST = re.compile(r"(^|[._])(hostname|host|fqdn)$", re.IGNORECASE)
_kept: Kept[list[Column]] = Kept(most=16)  # runs
_registered: Kept[Registered] = Kept(most=16)


def registered(connection: sa.Connection, run: sa.Row[Any]) -> Registered:
    """Return who the ranks of a run are; kept until one registers, or its place is found."""
    table = tables.rank.c
    at = table.registered_ns % (1 << 31)  # of which the sum of all ranks fits a number
    words = table.host.concat(table.role).concat(table.backend)
    counts = (table.rank, at, table.stage, table.local_rank, sa.func.length(words))
    version = connection.execute(
        sa.select(sa.func.count(), *(sa.func.sum(one) for one in counts)).where(
            table.run_id == run.run_id, table.attempt == run.attempt
        )
    ).one()
    key = (str(connection.engine.url), run.run_id, run.attempt)
    return _registered.get(key, (*version, run.world_size), lambda: _ranks_of(connection, run))


def _ranks_of(connection: sa.Connection, run: sa.Row[Any]) -> Registered:
    rows = {row.rank: row for row in rank_rows(connection, run.run_id, run.attempt, _COLUMNS)}
    height = max([run.world_size, *(rank + 1 for rank in rows)])
    return Registered(rows, height, place_columns(rows, height))


def place_columns(rows: dict[int, Any], height: int) -> list[Column]:
    """Return host, stage and local rank of each rank; not known where it never registered."""
    every = [rows.get(rank) for rank in range(height)]
    values = {
        "host": [(row and row.host) or None for row in every],
        "stage": [row.stage if row and row.stage >= 0 else None for row in every],
        "local rank": [row and row.local_rank for row in every],
    }
    kinds: dict[str, Kind] = {"host": "host", "stage": "stage", "local rank": "local_rank"}
    found = [_column(kinds[name], name, of_ranks) for name, of_ranks in values.items()]
    return [column for column in found if column.values]


def group_members(
    connection: sa.Connection, run: sa.Row[Any], chosen: Array
) -> tuple[list[Member], bool]:
    """Return the groups that hold all `chosen` ranks, and whether any group is recorded.

    Groups of the same ranks count once. What holds every rank separates none and is left out.
    """
    wanted = set(np.flatnonzero(chosen).tolist())
    groups = groups_of(connection, run)
    found: dict[frozenset[int], Member] = {}
    for group in groups:
        ranks = frozenset(group.ranks)
        if not 1 < len(ranks) < len(chosen) or not wanted <= ranks or ranks in found:
            continue
        is_member = np.zeros(len(chosen), bool)
        is_member[[rank for rank in ranks if rank < len(chosen)]] = True
        name = " ".join([*group.words, "group"])
        found[ranks] = Member("group", name, group_text(list(ranks), len(chosen)), is_member)
    return list(found.values()), bool(groups)


def fact_columns(
    connection: sa.Connection, run_id: str, attempt: int, height: int
) -> tuple[list[Column], int]:
    """Return the facts on which ranks of an attempt differ, and how many ranks sent any.

    What is of one rank by its nature is left out. Facts come once when a rank starts: they are
    kept until another rank sends its own.
    """
    version = (*stored_facts(connection, run_id, attempt), height)
    key = (str(connection.engine.url), run_id, attempt)
    found = _kept.get(
        key, version, lambda: list(_columns(facts_of(connection, run_id, attempt), height))
    )
    return found, version[0]


def _columns(facts: dict[int, dict[str, str]], height: int) -> Iterator[Column]:
    names = sorted(set[str]().union(*facts.values()))
    for name in names:
        if _HOST.search(name) or level_of(name) == "own":
            continue
        is_set = is_variable(name)
        raw = [
            facts[rank].get(name, "" if is_set else None) if rank in facts else None
            for rank in range(height)
        ]
        if len({value for value in raw if value is not None}) < 2:
            continue
        shown: dict[str, str] = {}  # of values that are equal the first that was sent
        values = [
            None if value is None or is_unknown(name, value)
            else shown.setdefault(normal(name, value), value)
            for value in raw
        ]  # fmt: skip
        distinct = list(shown.values())
        if len(distinct) > 1 and not all(is_near(name, distinct[0], one) for one in distinct):
            yield _column("fact", name, values)


def _column(kind: Kind, name: str, values: Sequence[Any]) -> Column:
    places: dict[Any, int] = {}
    codes = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
    return Column(kind, name, np.array(codes, np.int32), [str(value) for value in places])
