"""What every answer shares."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every answer."""


class Capped(Schema, frozen=True):
    """A list was cut."""

    shown: int
    total: int


class LeftOut(Schema, frozen=True):
    """What an answer does not count; `count` is null where only reading it all would show it."""

    what: str
    count: int | None


_Answer = TypeVar("_Answer", bound=Schema)


def capped(shown: int, total: int) -> Capped | None:
    """Return that a list was cut; None where it was not."""
    return Capped(shown=shown, total=total) if shown < total else None


def of_row(answer: type[_Answer], row: Any, /, **given: Any) -> _Answer:
    """Return an answer with what a row or object holds under the same names.

    `x_ms` is made of its `x_ns`; `given` fields are taken as they are.
    """
    value_of = row._mapping.__getitem__ if isinstance(row, sa.Row) else partial(getattr, row)
    for name, source, is_optional in _fields(answer):
        if name not in given:
            value = value_of(source)
            if source != name:
                value = to_ms(value) if is_optional else value / 1e6
            given[name] = value
    return answer(**given)


def json_object(text: str | None) -> Any:
    """Return what a JSON column holds; None for an empty one."""
    return msgspec.json.decode(text) if text else None


def to_ms(ns: int | None) -> float | None:
    """Return milliseconds of nanoseconds; zero and None are not known."""
    return ns / 1e6 if ns else None


@cache
def _fields(answer: type[Schema]) -> tuple[tuple[str, str, bool], ...]:
    """Return for each field its name, that of its source, and whether it may be unknown."""
    return tuple(
        (
            field.name,
            field.name.removesuffix("_ms") + "_ns" * field.name.endswith("_ms"),
            field.type is not float,
        )
        for field in msgspec.structs.fields(answer)
    )
