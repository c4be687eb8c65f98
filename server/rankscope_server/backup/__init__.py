"""Copies of a store that is in use, and how one becomes a store again.

Of SQLite the copy is a database of SQLite, of PostgreSQL an archive of `pg_dump`: other programs
read both. A copy is as of one moment, whatever is written meanwhile, and is there whole or not at
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import sqlalchemy as sa

from rankscope_server.backup import embedded, postgres
from rankscope_server.backup.errors import BackupError
from rankscope_server.settings import SettingsError, parse

__all__ = ["BackupError", "Copied", "backup", "restore"]


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied: where to, how large, and of which store (without its password)."""

    file: str
    store: str
    bytes: int


def backup(
    words: list[str],
    environ: dict[str, str],
    target: Path,
    *,
    overwrite: bool,
    without_objects: bool = False,
) -> Copied:
    """Write the store that these flags of `rankscope serve` name to a file.

    Raises BackupError, also where the data of chunks is in objects, which are not copied, unless
    that is meant: `without_objects`.
    """
    url = _url_of(words, environ)
    if target.exists() and not overwrite:
        raise BackupError(f"{target} is there already: name another file, or say --overwrite")
    if not target.parent.is_dir():
        raise BackupError(f"{target.parent} is no folder: make it first")
    part = target.with_name(f".{target.name}.part")
    try:
        _engine_of(url).write(url, part)
        if not without_objects and _engine_of(url).names_objects(url):
            raise BackupError(
                "the data of chunks is in objects, which this does not copy: keep their versions "
                "or a copy in their store, and say --without-objects to copy the database alone"
            )
        part.replace(target)
    except OSError as error:
        raise BackupError(f"{target} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return Copied(str(target), url.render_as_string(), target.stat().st_size)


def restore(words: list[str], environ: dict[str, str], file: Path, *, overwrite: bool) -> Copied:
    """Make a copy the store that these flags name; it must be empty, or `overwrite`.

    Raises BackupError; then the store is as it was.
    """
    url = _url_of(words, environ)
    try:
        kinds = {embedded: embedded.MAGIC, postgres: postgres.MAGIC}
        with file.open("rb") as opened:
            head = opened.read(max(map(len, kinds.values())))
        kind = next((kind for kind, magic in kinds.items() if head.startswith(magic)), None)
        if kind is None:
            raise BackupError(f"{file} is no copy that `rankscope backup` made")
        if kind is not _engine_of(url):
            raise BackupError(
                f"{file} is {kind.WHAT}, the store is {_engine_of(url).WHAT}: name a store of its "
                "kind with --data-dir or --database-url"
            )
        kind.read(url, file, overwrite=overwrite)
        return Copied(str(file), url.render_as_string(), file.stat().st_size)
    except OSError as error:
        raise BackupError(f"{file} cannot be restored: {error}") from error


def _url_of(words: list[str], environ: dict[str, str]) -> sa.URL:
    try:
        return sa.make_url(parse(words, environ).address_of_database())
    except (SettingsError, sa.exc.ArgumentError) as error:
        raise BackupError(str(error)) from error


def _engine_of(url: sa.URL) -> ModuleType:
    return embedded if url.get_backend_name() == "sqlite" else postgres
