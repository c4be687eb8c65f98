"""Tokens on the data directory itself: without a server, or beside one that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from rankscope_server.access import audit, tokens
from rankscope_server.access.audit import Deed
from rankscope_server.access.roles import ALL_PROJECTS
from rankscope_server.settings import Settings
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreVersionError,
    foresee,
    only_server,
    open_engines,
)
from rankscope_server.store.tables import token

BY = "command line"
_T = TypeVar("_T")


def change(settings: Settings, action: str, work: Callable[[sa.Connection, int], _T]) -> _T:
    """Do `work` on the store in one transaction, and write in the audit log that it was done.

    A server that runs takes note within seconds. Raises SQLAlchemyError, OSError,
    StoreVersionError, Problem.
    """
    with _opened(settings) as engine, engine.begin() as connection:
        now_ns = time.time_ns()
        done = work(connection, now_ns)
        audit.record(
            connection, Deed(action=action, who=BY, project=ALL_PROJECTS, target=str(_id(done))),
            now_ns,
        )  # fmt: skip
        return done


def listed(settings: Settings) -> list[sa.Row[Any]]:
    """Return all tokens. Raises as `change` does."""
    with _opened(settings) as engine, engine.connect() as connection:
        return tokens.rows(connection, None)


def has_tokens(url: str) -> bool:
    """Return whether a store holds tokens; leaves nothing behind."""
    if foresee(url) == "will be made":
        return False
    engine = sa.create_engine(_address(url), poolclass=sa.NullPool)
    if not sa.inspect(engine).has_table(token.name):
        return False
    with engine.connect() as connection:
        return tokens.exist(connection)


@contextmanager
def _opened(settings: Settings) -> Iterator[sa.Engine]:
    """Give the writing engine; the tables are brought up to date where no server runs."""
    url = settings.address_of_database()
    try:
        with only_server(url):
            engines = open_engines(url, settings.synchronous)
    except StoreInUseError:
        found = foresee(url)
        if "will be brought" in found:  # not beneath a server that runs
            raise StoreVersionError(
                f"{found}, by the server that runs on them now: use rankscope of its version, "
                "or --server"
            ) from None
        engines = open_engines(url, settings.synchronous)
    try:
        yield engines[0]
    finally:
        for engine in engines:
            engine.dispose()


def _address(url: str) -> sa.URL:
    address = sa.make_url(url)
    if address.drivername == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    return address


def _id(done: object) -> object:
    return done[0] if isinstance(done, tuple) else getattr(done, "id", "")
