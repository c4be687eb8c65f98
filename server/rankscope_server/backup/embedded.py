"""The embedded database: copied while a server writes to it, put in its place while none does."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from rankscope_server.backup.errors import BackupError
from rankscope_server.store.engine import (
    StoreInUseError,
    StoreVersionError,
    foresee,
    only_server,
)

MAGIC, WHAT = b"SQLite format 3\x00", "an embedded database"
_ASIDE = "before-restore"


def write(url: sa.URL, part: Path) -> None:
    """Write a copy as of now: one read transaction, which keeps no writer waiting.

    Raises BackupError, OSError.
    """
    path = _path_of(url)
    if not path.exists() or not path.stat().st_size:
        raise BackupError(f"{path} is not there: name the folder of the server with --data-dir")
    needed, free = path.stat().st_size, shutil.disk_usage(part.parent).free
    if free < needed:
        raise BackupError(f"{needed:,} bytes are needed in {part.parent}, {free:,} are free")
    _make(part)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
            source.execute("VACUUM INTO ?", [str(part)])
    except sqlite3.Error as error:
        raise BackupError(f"{path} cannot be copied: {error}") from error
    _check(part)
    _sync(part)


def names_objects(url: sa.URL) -> bool:
    """Return whether rows name objects that hold their data. Raises BackupError."""
    try:
        with closing(
            sqlite3.connect(f"{_path_of(url).absolute().as_uri()}?mode=ro", uri=True)
        ) as store:
            names = {row[1] for row in store.execute("PRAGMA table_info(chunk)")}
            if "object" not in names:  # a version from before there were any
                return False
            found = store.execute("SELECT 1 FROM chunk WHERE object IS NOT NULL LIMIT 1")
            return found.fetchone() is not None
    except sqlite3.Error as error:
        raise BackupError(f"{_path_of(url)} cannot be read: {error}") from error


def read(url: sa.URL, file: Path, *, overwrite: bool) -> None:
    """Put a copy in the place of the database; what was there keeps its content, set aside.

    Raises BackupError, OSError.
    """
    path = _path_of(url)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.part")
    try:
        with only_server(str(url)):
            is_there = path.exists() and path.stat().st_size > 0
            if is_there and not overwrite:
                raise BackupError(
                    f"{path} holds data already: name another --data-dir, or say --overwrite "
                    f"(what is there is then kept beside it, as {path.name}.{_ASIDE})"
                )
            _make(part)
            shutil.copyfile(file, part)
            _check(part)
            foresee(f"sqlite:///{part}")
            _sync(part)
            if is_there:
                _set_aside(path)
            for rest in ("-wal", "-shm"):  # of an empty database
                path.with_name(path.name + rest).unlink(missing_ok=True)
            part.replace(path)
            _sync(path.parent)
    except (StoreInUseError, StoreVersionError) as error:
        raise BackupError(str(error)) from error
    except sa.exc.SQLAlchemyError as error:
        raise BackupError(f"{file} cannot be read: {error}") from error
    finally:
        for rest in ("", "-wal", "-shm"):
            part.with_name(part.name + rest).unlink(missing_ok=True)


def _set_aside(path: Path) -> None:
    """Rename a database; its log goes with it, as it may hold the newest of what it has."""
    aside = path.with_name(f"{path.name}.{_ASIDE}")
    if aside.exists():
        raise BackupError(f"{aside} is there from before: remove it first, or move it away")
    for rest in ("-wal", "-shm", ""):
        one = path.with_name(path.name + rest)
        if one.exists():
            one.rename(aside.with_name(aside.name + rest))


def _path_of(url: sa.URL) -> Path:
    return Path(str(url.database))


def _make(part: Path) -> None:
    """Make an empty file that its owner alone may read: it will hold logs and hashes of tokens."""
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _check(part: Path) -> None:
    """Raise BackupError where a copy is damaged."""
    try:
        with closing(sqlite3.connect(f"{part.absolute().as_uri()}?mode=ro", uri=True)) as copy:
            (said,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        raise BackupError(f"the copy is damaged: {error}") from error
    if said != "ok":
        raise BackupError(f"the copy is damaged: {said}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
