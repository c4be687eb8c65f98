"""Which lines of a block match a tree; and, from its tally alone, which may and which surely do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import sqlalchemy as sa

from rankscope_server.search.scan import lines_with
from rankscope_server.search.tree import (
    And,
    Names,
    Node,
    Not,
    Numbers,
    Or,
    QueryError,
    Regex,
    Text,
    Time,
    leaves,
)
from rankscope_server.store import tables
from rankscope_server.store.line_kinds import COLUMNS
from rankscope_server.store.lines import Body, Head

Array = np.ndarray[Any, np.dtype[Any]]
Masks: TypeAlias = tuple[Array, Array]  # what may match, what surely does
_MOST = (1 << 63) - 1


class Tallies(NamedTuple):
    """The tallies of several blocks: a row for each kind of lines that a block has."""

    kind: Array  # of each row its place in `kinds`
    num_lines: Array  # of each row
    at: Array  # of each row its block
    kinds: Array  # of each kind a row, columns as `line_kinds.COLUMNS`
    host: Array  # of each block; also what follows
    time_lo_ns: Array
    time_hi_ns: Array
    step_lo: Array
    step_hi: Array
    names: dict[int, str]  # of hosts, loggers and streams, by the number of the word


class Lines:
    """A block with its columns and its texts, each of which is read where something asks for it."""

    def __init__(
        self,
        host: int,  # the number of the word
        count: int,
        names: Callable[[Head], dict[int, str]],
        head: Callable[[], Head],
        body: Callable[[], Body],
    ) -> None:
        self.host, self._count = host, count
        self._names, self._head, self._body = names, head, body

    def __len__(self) -> int:
        return self._count

    @cached_property
    def head(self) -> Head:
        """Return the columns."""
        return self._head()

    @cached_property
    def body(self) -> Body:
        """Return the texts."""
        return self._body()

    @cached_property
    def names(self) -> dict[int, str]:
        """Return the words of hosts, loggers and streams, by their numbers."""
        return self._names(self.head)


def needs_text(node: Node) -> bool:
    """Return whether the texts of lines decide."""
    return any(isinstance(leaf, Text | Regex) for leaf in leaves(node))


def match_tallies(node: Node, tallies: Tallies) -> Masks:
    """Return for each row whether its lines may match, and whether all of them do."""
    if isinstance(node, And):
        return _combined(node.nodes, tallies, np.logical_and, True)
    if isinstance(node, Or):
        return _combined(node.nodes, tallies, np.logical_or, False)
    if isinstance(node, Not):
        may, must = match_tallies(node.node, tallies)
        return ~must, ~may
    if isinstance(node, Time):
        ranges = ((_or(node.from_ns, -_MOST), _or(node.to_ns, _MOST)),)
        may, must = _bounds(tallies.time_lo_ns, tallies.time_hi_ns, ranges)
        return may[tallies.at], must[tallies.at]
    if isinstance(node, Numbers):
        if node.field == "step":
            return _match_steps(node, tallies)
        mask = _in_ranges(tallies.kinds[:, COLUMNS.index(node.field)], node.ranges)[tallies.kind]
        return mask, mask
    if isinstance(node, Names):
        wanted = [number for number, name in tallies.names.items() if is_named(node, name)]
        if node.field == "host":
            mask = np.isin(tallies.host, wanted)[tallies.at]
        else:
            mask = np.isin(tallies.kinds[:, COLUMNS.index(node.field)], wanted)[tallies.kind]
        return mask, mask
    size = len(tallies.kind)
    return np.ones(size, bool), np.zeros(size, bool)


def match_lines(node: Node, lines: Lines) -> Array:
    """Return which lines of a block match."""
    if isinstance(node, And):
        mask = np.ones(len(lines), bool)
        for child in sorted(node.nodes, key=needs_text):
            if mask.any():
                mask &= match_lines(child, lines)
        return mask
    if isinstance(node, Or):
        mask = np.zeros(len(lines), bool)
        for child in node.nodes:
            mask |= match_lines(child, lines)
        return mask
    if isinstance(node, Not):
        return ~match_lines(node.node, lines)
    if isinstance(node, Time):
        times = lines.head.time_ns
        return (times >= _or(node.from_ns, -_MOST)) & (times <= _or(node.to_ns, _MOST))
    if isinstance(node, Numbers):
        return _in_ranges(getattr(lines.head, node.field), node.ranges)
    if isinstance(node, Names):
        return _match_names(node, lines)
    return lines_with(node, lines.body.texts)


def is_named(node: Names, name: str) -> bool:
    """Return whether a name is one of those that are looked for."""
    return _names_pattern(node.names).fullmatch(name) is not None


@lru_cache(256)
def _names_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    options = (".*".join(map(re.escape, name.split("*"))) for name in names)
    return re.compile("|".join(f"(?:{option})" for option in options), re.IGNORECASE | re.DOTALL)


def resolve_groups(connection: sa.Connection, run_id: str | None, node: Node) -> Node:
    """Return the tree with the ranks of each process group in place of its name.

    Raises QueryError where a run has no such group, or where no run is given.
    """
    if isinstance(node, And | Or):
        return type(node)(tuple(resolve_groups(connection, run_id, x) for x in node.nodes))
    if isinstance(node, Not):
        return Not(resolve_groups(connection, run_id, node.node))
    if not isinstance(node, Names) or node.field != "group":
        return node
    if run_id is None:
        raise QueryError(
            "groups are of one run", node.place, "search within a run, or use rank: and host:"
        )
    table = tables.process_group.c
    columns = table.attempt, table.group, table.description, table.ranks
    rows = connection.execute(sa.select(*columns).where(table.run_id == run_id)).all()
    found = tuple(
        And((
            Numbers("attempt", ((attempt, attempt),)),
            Numbers("rank", _as_ranges(json.loads(ranks))),
        ))
        for attempt, name, description, ranks in rows
        if is_named(node, name) or (description and is_named(node, description))
    )  # fmt: skip
    if not found:
        known = ", ".join(dict.fromkeys(row.group for row in rows[:12])) or "it has none"
        raise QueryError(f"the run has no group {node.names[0][:60]!r}", node.place, known)
    return Or(found)


def _as_ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return tuple(ranges)


def _combined(nodes: Sequence[Node], tallies: Tallies, join: Any, start: bool) -> Masks:
    may = np.full(len(tallies.kind), start)
    must = may.copy()
    for node in nodes:
        one = match_tallies(node, tallies)
        may, must = join(may, one[0]), join(must, one[1])
    return may, must


def _bounds(lo: Array, hi: Array, ranges: Sequence[tuple[int, int]]) -> Masks:
    may, must = np.zeros(len(lo), bool), np.zeros(len(lo), bool)
    for least, most in ranges:
        may |= (hi >= least) & (lo <= most)
        must |= (lo >= least) & (hi <= most)
    return may, must


def _match_steps(node: Numbers, tallies: Tallies) -> Masks:
    """Return the same of steps; where a line has none, its step is 0."""
    may, must = _bounds(tallies.step_lo, tallies.step_hi, node.ranges)
    has_step = (tallies.kinds[:, COLUMNS.index("has_step")] > 0)[tallies.kind]
    is_zero_in = any(lo <= 0 <= hi for lo, hi in node.ranges)
    may, must = may[tallies.at], must[tallies.at]
    return np.where(has_step, may, is_zero_in), np.where(has_step, must, is_zero_in)


def _in_ranges(values: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    mask = np.zeros(len(values), bool)
    for least, most in ranges:
        mask |= (values >= least) & (values <= most)
    return mask


def _match_names(node: Names, lines: Lines) -> Array:
    if node.field == "host":
        return np.full(len(lines), is_named(node, lines.names[lines.host]))
    head = lines.head
    numbers = head.logger if node.field == "logger" else head.stream
    known = np.unique(numbers).tolist()
    return np.isin(numbers, [number for number in known if is_named(node, lines.names[number])])


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
