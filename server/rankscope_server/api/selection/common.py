"""What some ranks have in common that the others have not. Pure.

Something counts where every selected rank has it, and either no other rank has, or so few others
that as many ranks chosen at random would all have it in less than one of `_RARE` cases. It is
never said of a rank of which it is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from rankscope_server.api.selection.schema import Kind, Shared

Array = np.ndarray[Any, np.dtype[Any]]
_RARE = 20
_MOST_NAMED = 4  # values of whole groups
_ORDER: dict[Kind, int] = {kind: place for place, kind in enumerate(get_args(Kind))}


@dataclass(frozen=True, slots=True)
class Column:
    """What each rank has of one thing."""

    kind: Kind
    name: str
    codes: Array  # per rank a place in `values`; -1: not known
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Member:
    """Who belongs to something, for example to a process group; known of every rank."""

    kind: Kind
    name: str
    value: str
    ranks: Array  # bool, one a rank


def shared_of(
    chosen: Array, columns: Iterable[Column], members: Iterable[Member]
) -> tuple[list[Shared], list[Shared]]:
    """Return what all `chosen` ranks have in common, and what only as far as it is known.

    Both in the order of how few others have it, too.
    """
    common: list[Shared] = []
    in_part: list[Shared] = []
    for one in (*_of_columns(chosen, columns), *_of_members(chosen, members)):
        if not _separates(one):
            continue
        is_known = not one.num_unknown and one.num_others_unknown <= one.num_others_known
        (common if is_known else in_part).append(one)
    for found in (common, in_part):
        found.sort(key=lambda one: (one.num_others, _ORDER[one.kind]))
    return common, in_part


def chance(num_selected: int, num_having: int, num_known: int) -> float:
    """Return how often `num_selected` ranks that are chosen at random all have something."""
    return math.exp(_log_choices(num_having, num_selected) - _log_choices(num_known, num_selected))


def _separates(one: Shared) -> bool:
    if not one.num_selected or not one.num_others_known:
        return False
    if not one.num_others:
        return one.num_selected > 1 or one.kind != "local_rank"
    num_having = one.num_selected + one.num_others
    num_known = one.num_selected + one.num_others_known
    return one.num_selected > 1 and chance(one.num_selected, num_having, num_known) < 1 / _RARE


def _of_columns(chosen: Array, columns: Iterable[Column]) -> Iterator[Shared]:
    for column in columns:
        is_known = column.codes >= 0
        codes = np.unique(column.codes[chosen & is_known])
        if len(codes) == 1:
            has = column.codes == codes[0]
            yield _counted(column.kind, column.name, column.values[codes[0]], has, is_known, chosen)
        elif 1 < len(codes) <= _MOST_NAMED and column.kind in ("host", "stage"):
            has = np.isin(column.codes, codes)
            if not (has & ~chosen).any():
                names = " or ".join(column.values[code] for code in codes.tolist())
                yield _counted(column.kind, column.name, names, has, is_known, chosen)


def _of_members(chosen: Array, members: Iterable[Member]) -> Iterator[Shared]:
    everyone = np.ones(len(chosen), bool)
    for member in members:
        if member.ranks[chosen].all():
            yield _counted(member.kind, member.name, member.value, member.ranks, everyone, chosen)


def _counted(
    kind: Kind, name: str, value: str, has: Array, is_known: Array, chosen: Array
) -> Shared:
    others = ~chosen
    return Shared(
        kind=kind,
        name=name,
        value=value,
        text=_text(kind, name, value),
        num_selected=int((has & chosen).sum()),
        num_unknown=int((~is_known & chosen).sum()),
        num_others=int((has & others).sum()),
        num_others_known=int((is_known & others).sum()),
        num_others_unknown=int((~is_known & others).sum()),
    )


def _text(kind: Kind, name: str, value: str) -> str:
    if kind == "host":
        return f"on {value}"
    if kind == "stage":
        return f"in pipeline stage {value}"
    if kind == "group":
        return f"in the {name} of {value}"
    if kind == "local_rank":
        return f"with local rank {value}"
    if kind == "finding":
        return "named by one finding"
    if kind == "error":
        return f"with the error {value}"
    return f"with {name} {value or 'not set'}"


def _log_choices(many: int, few: int) -> float:
    if few > many:
        return -math.inf
    return math.lgamma(many + 1) - math.lgamma(few + 1) - math.lgamma(many - few + 1)
