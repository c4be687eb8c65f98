"""What a query asks for, as a tree; every leaf knows where in the query it was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Number: TypeAlias = Literal["rank", "level", "step", "attempt"]
Name: TypeAlias = Literal["host", "logger", "stream", "group", "run", "project"]


@dataclass(frozen=True, slots=True)
class Place:
    """From and to which character of the query something was written, the end excluded."""

    start: int
    end: int


class QueryError(ValueError):
    """A query that cannot be understood: what is wrong, where, and what to do about it."""

    def __init__(self, what: str, place: Place, remedy: str) -> None:
        super().__init__(what)
        self.what, self.place, self.remedy = what, place, remedy


@dataclass(frozen=True, slots=True)
class Text:
    """A word or phrase, in any case. Where it is open, it may begin or end within a word."""

    text: str
    is_open_left: bool = False
    is_open_right: bool = False
    place: Place = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression of RE2; `^` and `$` are the ends of each line of a message."""

    pattern: str
    ignores_case: bool = False
    place: Place = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Lines whose number is in one of the ranges, both ends included."""

    field: Number
    ranges: tuple[tuple[int, int], ...]
    place: Place = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Names:
    """Lines whose field has one of the names, in any case; `*` in a name stands for any text."""

    field: Name
    names: tuple[str, ...]
    place: Place = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Time:
    """Lines from one time to another, both included, in nanoseconds; None: without that end."""

    from_ns: int | None = None
    to_ns: int | None = None
    place: Place = Place(0, 0)


@dataclass(frozen=True, slots=True)
class OfRuns:
    """Lines of these runs, by their ids: what the store makes of the name of a group."""

    runs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Not:
    """Lines that do not match."""

    node: Node


@dataclass(frozen=True, slots=True)
class And:
    """Lines that match all; without nodes every line."""

    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Or:
    """Lines that match at least one."""

    nodes: tuple[Node, ...]


Node: TypeAlias = Text | Regex | Numbers | Names | Time | OfRuns | Not | And | Or
EVERYTHING = And()


def leaves(node: Node) -> list[Node]:
    """Return the leaves of a tree, in the order in which they were written."""
    if isinstance(node, Not):
        return leaves(node.node)
    if isinstance(node, And | Or):
        return [leaf for child in node.nodes for leaf in leaves(child)]
    return [node]


def both(*nodes: Node) -> Node:
    """Return what matches all of the nodes."""
    wanted = tuple(node for node in nodes if node != EVERYTHING)
    return wanted[0] if len(wanted) == 1 else And(wanted)
