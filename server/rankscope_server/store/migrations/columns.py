"""Columns as migrations write them. They never change: a change would rewrite history."""

from __future__ import annotations

import sqlalchemy as sa


def serial() -> sa.Column[int]:
    """Return a key that the database numbers; SQLite does so only where it is an INTEGER."""
    kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("id", kind, primary_key=True, autoincrement=True)


def run_key() -> sa.Column[str]:
    """Return the run as a part of the key."""
    return sa.Column("run_id", sa.String(128), primary_key=True)


def run() -> sa.Column[str]:
    """Return the run that a row is of."""
    return sa.Column("run_id", sa.String(128), nullable=False)


def number(name: str, default: int | None = 0, *, is_key: bool = False) -> sa.Column[int]:
    """Return a whole number; without a default it may be missing."""
    if is_key:
        return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)
    if default is None:
        return sa.Column(name, sa.BigInteger)
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=str(default))


def text(name: str, default: str | None = "") -> sa.Column[str]:
    """Return a text; without a default it may be missing."""
    if default is None:
        return sa.Column(name, sa.Text)
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def word(
    name: str, length: int, default: str | None = None, *, is_key: bool = False
) -> sa.Column[str]:
    """Return a short text, never missing."""
    kind = sa.String(length)
    if is_key:
        return sa.Column(name, kind, primary_key=True)
    return sa.Column(name, kind, nullable=False, server_default=default)


def blob(name: str, *, is_nullable: bool = False) -> sa.Column[bytes]:
    """Return bytes."""
    return sa.Column(name, sa.LargeBinary, nullable=is_nullable)
