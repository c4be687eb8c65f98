"""Which lines of a block match a tree; and, from its tally alone, which may and which surely do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rankscope_server.search.scan import lines_with
from rankscope_server.search.tree import (
    And,
    Names,
    Node,
    Not,
    Numbers,
    OfRuns,
    Or,
    Regex,
    Text,
    Time,
    leaves,
)
from rankscope_server.store.line_kinds import COLUMNS
from rankscope_server.store.lines import Body, Head

Array = np.ndarray[Any, np.dtype[Any]]
Masks: TypeAlias = tuple[Array, Array]  # what may match, what surely does
_OF_RUN = ("run", "project")
_MOST = (1 << 63) - 1


@dataclass(slots=True)
class RunNumbers:
    """Runs by small numbers of their own: what counts and filters look at in place of ids."""

    ids: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    projects: dict[int, str] = field(default_factory=dict)

    def among(self, node: Names | OfRuns) -> list[int]:
        """Return the numbers of the runs that a node asks for."""
        if isinstance(node, OfRuns):
            return [number for number, run_id in self.ids.items() if run_id in node.runs]
        if node.field == "project":
            return [number for number, project in self.projects.items() if is_named(node, project)]
        return [
            number
            for number, run_id in self.ids.items()
            if is_named(node, run_id) or is_named(node, self.names[number])
        ]


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
    run: Array  # of each block the number of its run
    names: dict[int, str]  # of hosts, loggers and streams, by the number of the word
    runs: RunNumbers


class Lines:
    """A block with its columns and its texts, each of which is read where something asks for it."""

    def __init__(
        self,
        run: int,  # its number in `runs`
        runs: RunNumbers,
        host: int,  # the number of the word
        count: int,
        names: Callable[[Head], dict[int, str]],
        head: Callable[[], Head],
        body: Callable[[], Body],
    ) -> None:
        self.run, self.runs = run, runs
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
    if isinstance(node, OfRuns) or (isinstance(node, Names) and node.field in _OF_RUN):
        mask = np.isin(tallies.run, tallies.runs.among(node))[tallies.at]
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
    if isinstance(node, Names | OfRuns):
        return _match_names(node, lines)
    return lines_with(node, lines.body.texts)


def is_named(node: Names, name: str) -> bool:
    """Return whether a name is one of those that are looked for."""
    return _names_pattern(node.names).fullmatch(name) is not None


@lru_cache(256)
def _names_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    options = (".*".join(map(re.escape, name.split("*"))) for name in names)
    return re.compile("|".join(f"(?:{option})" for option in options), re.IGNORECASE | re.DOTALL)


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


def _match_names(node: Names | OfRuns, lines: Lines) -> Array:
    if isinstance(node, OfRuns) or node.field in _OF_RUN:
        return np.full(len(lines), lines.run in lines.runs.among(node))
    if node.field == "host":
        return np.full(len(lines), is_named(node, lines.names[lines.host]))
    head = lines.head
    numbers = head.logger if node.field == "logger" else head.stream
    known = np.unique(numbers).tolist()
    return np.isin(numbers, [number for number in known if is_named(node, lines.names[number])])


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
