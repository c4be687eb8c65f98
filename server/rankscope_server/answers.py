"""What every answer shares."""

from __future__ import annotations

from typing import Any

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every answer."""


class Capped(Shape, frozen=True):
    """A list was cut."""

    shown: int
    total: int


def json_object(text: str | None) -> Any:
    """Return what a JSON column holds; None for an empty one."""
    return msgspec.json.decode(text) if text else None


def to_ms(ns: int | None) -> float | None:
    """Return milliseconds of nanoseconds; zero and None are not known."""
    return ns / 1e6 if ns else None
