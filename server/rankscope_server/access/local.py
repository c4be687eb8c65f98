"""Tokens on the data directory itself: without a server, or beside one that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from rankscope_server.access import audit, tokens
from rankscope_server.access.audit import Deed
from rankscope_server.access.roles import ALL_PROJECTS
from rankscope_server.access.tokens import NewToken
from rankscope_server.problems import Problem
from rankscope_server.settings import Settings, SettingsError, parse
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreVersionError,
    foresee,
    only_server,
    open_engines,
)
from rankscope_server.store.tables import token

BY = "command line"


class LocalError(Exception):
    """It could not be done; the message says why and what to do."""


def create(
    flags: Sequence[str], environ: Mapping[str, str], asked: dict[str, Any]
) -> dict[str, str]:
    """Make a token; return its id and text. `asked` as the API takes it. Raises LocalError."""
    days = asked.get("expires_days")

    def work(connection: sa.Connection, now_ns: int) -> tuple[str, str]:
        new = NewToken(
            name=asked["name"], roles=tuple(asked["roles"]), project=asked["project"],
            bytes_per_second=asked["bytes_per_second"],
            events_per_second=asked["events_per_second"],
            expires_ns=None if days is None else now_ns + int(days * 86_400e9),
        )  # fmt: skip
        return tokens.create(connection, new, BY, now_ns)

    return _made(_change(flags, environ, "create token", work))


def rotate(
    flags: Sequence[str], environ: Mapping[str, str], id: str, grace_hours: float
) -> dict[str, str]:
    """Make a token like another one, which then ends. Raises LocalError."""

    def work(connection: sa.Connection, now_ns: int) -> tuple[str, str]:
        return tokens.rotate(connection, id, None, BY, now_ns, int(grace_hours * 3600e9))

    return _made(_change(flags, environ, "rotate token", work))


def revoke(flags: Sequence[str], environ: Mapping[str, str], id: str) -> None:
    """End a token. Raises LocalError."""

    def work(connection: sa.Connection, now_ns: int) -> tuple[str, str]:
        return str(tokens.revoke(connection, id, None, now_ns).id), ""

    _change(flags, environ, "revoke token", work)


def rows(flags: Sequence[str], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return all tokens as the API shows them. Raises LocalError."""
    now_ns = time.time_ns()
    with _opened(flags, environ) as engine, engine.connect() as connection:
        return [tokens.row_shown(row, now_ns) for row in tokens.rows(connection, None)]


def _change(
    flags: Sequence[str],
    environ: Mapping[str, str],
    action: str,
    work: Callable[[sa.Connection, int], tuple[str, str]],
) -> tuple[str, str]:
    """Do `work` in one transaction, and write in the audit log that it was done."""
    with _opened(flags, environ) as engine, engine.begin() as connection:
        now_ns = time.time_ns()
        done = work(connection, now_ns)
        deed = Deed(action=action, who=BY, project=ALL_PROJECTS, target=done[0])
        audit.record(connection, deed, now_ns)
        return done


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
def _opened(flags: Sequence[str], environ: Mapping[str, str]) -> Iterator[sa.Engine]:
    """Give the writing engine; the tables are brought up to date where no server runs."""
    try:
        settings = parse(flags, environ)
        engines = _engines(settings)
        try:
            yield engines[0]
        finally:
            for engine in engines:
                engine.dispose()
    except Problem as problem:
        raise LocalError(f"{problem.what}; {problem.remedy}") from problem
    except (SettingsError, StoreVersionError, OSError, ImportError) as error:
        raise LocalError(str(error)) from error
    except sa.exc.SQLAlchemyError as error:
        raise LocalError(f"{error}; name another store with --data-dir") from error


def _engines(settings: Settings) -> tuple[sa.Engine, sa.Engine]:
    url = settings.address_of_database()
    try:
        with only_server(url):
            return open_engines(url, settings.synchronous)
    except StoreInUseError:
        found = foresee(url)
        if "will be brought" in found:  # not beneath a server that runs
            raise StoreVersionError(
                f"{found}, but a server runs on them now: use rankscope of its version, or --server"
            ) from None
        return open_engines(url, settings.synchronous)


def _address(url: str) -> sa.URL:
    address = sa.make_url(url)
    if address.drivername == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    return address


def _made(made: tuple[str, str]) -> dict[str, str]:
    return {"id": made[0], "token": made[1]}
