"""PostgreSQL: its own programs copy it, and read a copy back in one transaction."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from rankscope_server.backup.errors import BackupError
from rankscope_server.store.engine import StoreVersionError, foresee
from rankscope_server.store.tables import metadata

MAGIC, WHAT = b"PGDMP", "an archive of pg_dump"


def write(url: sa.URL, part: Path) -> None:
    """Write an archive as of now; writers do not wait for it. Raises BackupError."""
    if not _tables_in(url):
        raise BackupError(f"{url.render_as_string()} has no tables of Rankscope")
    _run(
        url, "pg_dump", "--format=custom", "--no-owner", "--no-privileges", "--file", str(part),
        "--dbname", _address(url),
    )  # fmt: skip
    part.chmod(0o600)


def names_objects(url: sa.URL) -> bool:
    """Return whether rows name objects that hold their data. Raises BackupError."""
    chunk = sa.table("chunk", sa.column("object"))
    with _reading(url) as connection:
        if "object" not in {one["name"] for one in sa.inspect(connection).get_columns("chunk")}:
            return False  # a version from before there were any
        named = sa.select(chunk.c.object).where(chunk.c.object.is_not(None)).limit(1)
        return connection.scalar(named) is not None


def read(url: sa.URL, file: Path, *, overwrite: bool) -> None:
    """Read an archive into the database, wholly or not at all.

    Raises BackupError.
    """
    there = _tables_in(url)
    if there and not overwrite:
        raise BackupError(
            f"{url.render_as_string()} holds tables of Rankscope already: name an empty database, "
            "or stop the servers on this one and say --overwrite"
        )
    more = ["--clean", "--if-exists"] if there else []
    _run(
        url, "pg_restore", "--single-transaction", "--exit-on-error", "--no-owner",
        "--no-privileges", *more, "--dbname", _address(url), str(file),
    )  # fmt: skip
    try:
        foresee(str(url.render_as_string(hide_password=False)))
    except (StoreVersionError, sa.exc.SQLAlchemyError) as error:
        raise BackupError(str(error)) from error


def _tables_in(url: sa.URL) -> set[str]:
    """Return our tables that are there. Raises BackupError where the server does not answer."""
    with _reading(url) as connection:
        return set(sa.inspect(connection).get_table_names()) & set(metadata.tables)


@contextmanager
def _reading(url: sa.URL) -> Iterator[sa.Connection]:
    """Give a connection. Raises BackupError where the server does not answer."""
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"), poolclass=sa.NullPool,
        connect_args={"connect_timeout": 10},
    )  # fmt: skip
    try:
        with engine.connect() as connection:
            yield connection
    except sa.exc.SQLAlchemyError as error:
        reason = str(error).partition("\n")[0]
        raise BackupError(f"{url.render_as_string()} does not answer: {reason}") from error


def _address(url: sa.URL) -> str:
    """Return the address as libpq takes it; its password is in the environment instead."""
    plain = url.set(drivername="postgresql", password=None)
    return plain.render_as_string(hide_password=False)


def _run(url: sa.URL, program: str, *arguments: str) -> None:
    environ = dict(os.environ)
    if url.password is not None:
        environ["PGPASSWORD"] = str(url.password)
    try:
        done = subprocess.run(
            [program, *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise BackupError(
            f"{program} is not installed: it comes with the client of PostgreSQL "
            "(apt-get install postgresql-client), of the server's version or newer"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BackupError(f"{program}: {' '.join(lines[:3]) or f'exit code {done.returncode}'}")
