"""Opens the database: engines for the writer and the readers, migrations, one server per file."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite

from rankscope_server.store.carried import carry_over
from rankscope_server.store.tables import metadata

log = logging.getLogger(__name__)
MIGRATIONS = Path(__file__).parent / "migrations"
NUM_READERS, MORE_READERS = 8, 32  # connections that stay, and that come and go
OLDEST_POSTGRES = 14
BUSY_SECONDS = 10
COPY_ROOM = 2.5  # of the size of a database: its copy, and what is written anew
_MIGRATION_LOCK = 0x52414E4B  # of the database server: "RANK"
_VERSION = re.compile(r"\d{4}(_|$)")  # of all versions but the first
WAL_LIMIT_BYTES = 64 << 20  # a larger one is cut to it once it is empty
# Of each column the table and the name, at once: a server that starts looks at all of them.
_COLUMNS = {
    "sqlite": "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c",
    "postgresql": "SELECT table_name, column_name FROM information_schema.columns"
    " WHERE table_schema = current_schema()",
}
# A process that is stopped within a transaction keeps what it locked: PostgreSQL ends it then.
STOPPED_SECONDS = 5.0
# PostgreSQL's codes: this process stood still in the middle of one, a deadlock
_ROLLED_BACK = frozenset({"25P03", "40P01"})
_ONLY_READS = "25006"


class StoreUnavailableError(RuntimeError):
    """The store cannot take or give data now; `remedy` says what a person can do about it.

    `cause` is one word for the counters.
    """

    def __init__(self, what: str, remedy: str, cause: str = "database") -> None:
        super().__init__(what)
        self.remedy, self.cause = remedy, cause


class StoreInUseError(RuntimeError):
    """Another server process owns this database file."""


class StoreVersionError(RuntimeError):
    """Another version of Rankscope made these tables, or the database server is too old."""


def open_engines(url: str, synchronous: str) -> tuple[sa.Engine, sa.Engine]:
    """Return (writer, reader) engines, the tables migrated to the newest version.

    Raises SQLAlchemyError where the database cannot be opened, OSError where its folder cannot,
    ImportError where its driver is not installed, StoreVersionError where another version made
    its tables or the database server is too old. Readers get StoreUnavailableError in
    place of what `explain` explains.
    """
    address = _address(url)
    if address.get_backend_name() != "sqlite":
        writer = _writing(address)
        # One answer sees one state of the store, as it does on SQLite.
        reading: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
        if address.get_driver_name() == "psycopg":
            reading["connect_args"] = {"cursor_factory": _binary_cursor()}
        reader = _server(address, pool_size=NUM_READERS, **reading)
    else:
        path = Path(str(address.database))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Log lines and stacks of a training program: for the owner only.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        writer = _sqlite(address, synchronous, "BEGIN IMMEDIATE", pool_size=1)
        reader = _sqlite(address, synchronous, "BEGIN", pool_size=NUM_READERS)
    try:
        migrate(writer)
    except BaseException:
        writer.dispose()  # the reader has no connection yet
        raise
    sa.event.listen(reader, "handle_error", _explained, retval=True)
    return writer, reader


def open_for_leases(url: str) -> sa.Engine:
    """Return an engine of one connection beside that of the writer, which work may keep busy."""
    return _writing(_address(url))


def open_for_notices(url: str) -> sa.Engine:
    """Return an engine whose connections hear what other processes say. PostgreSQL alone."""
    return sa.create_engine(_address(url), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")


def _explained(context: sa.engine.ExceptionContext) -> BaseException | None:
    if context.is_pre_ping or context.sqlalchemy_exception is None:
        return None  # a connection that died is replaced
    return explain(context.sqlalchemy_exception)


def migrate(engine: sa.Engine) -> None:
    """Bring the tables to the newest version, wholly or not at all.

    Raises SQLAlchemyError, OSError, StoreVersionError.
    """
    config = _configuration()
    scripts = ScriptDirectory.from_config(config)
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":  # of servers that start together one migrates
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        stored = _check_version(connection, scripts)
        newest = scripts.get_current_head()
        is_old = stored is not None and stored != newest
        if is_old:
            log.warning("the tables are of version %s: they are brought to %s", stored, newest)
            _copy_beside(engine.url, str(stored))
        if stored != newest:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        carry_over(connection)
        connection.commit()
    if is_old:
        log.warning("the tables are of version %s now", newest)
        _give_room_back(engine)


def _copy_beside(address: sa.URL, version: str) -> None:
    """Copy an embedded database that is about to be migrated, if there is room.

    The transaction of the caller keeps all others from writing.
    """
    if address.get_backend_name() != "sqlite":
        return
    path = Path(str(address.database))
    copy = path.with_name(f"{path.name}.{version}")
    size = sum(part.stat().st_size for part in (path, Path(f"{path}-wal")) if part.exists())
    free = shutil.disk_usage(path.parent).free
    if copy.exists():
        log.warning("a copy of it from before is there already: %s", copy)
        return
    if free < COPY_ROOM * size:
        log.warning(
            "there is no room for a copy of it: %s bytes are free, %s are needed; they are "
            "migrated without", free, COPY_ROOM * size,
        )  # fmt: skip
        return
    try:
        _copy(path, copy)
    except (OSError, sqlite3.Error) as error:
        log.warning("no copy of it could be made, they are migrated without: %s", error)
    else:
        log.warning("a copy of it as it was is %s; remove it when all is well", copy)


def _copy(path: Path, copy: Path) -> None:
    """Copy a database with what is in its log; a copy that was not finished has another name."""
    part = copy.with_name(copy.name + ".part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_CREAT | os.O_RDWR, 0o600))
    with (
        closing(sqlite3.connect(path)) as source,
        closing(sqlite3.connect(part)) as target,
    ):
        source.backup(target)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(copy)


def _give_room_back(engine: sa.Engine) -> None:
    """Write an embedded database anew where its first version could not shrink."""
    with engine.connect() as connection:
        if connection.dialect.name != "sqlite":
            return
        is_shrinking = connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != 0
    path = Path(str(engine.url.database))
    if is_shrinking or shutil.disk_usage(path.parent).free < COPY_ROOM * path.stat().st_size:
        return
    raw = engine.raw_connection()  # outside of a transaction
    try:
        raw.cursor().execute("PRAGMA auto_vacuum=INCREMENTAL").execute("VACUUM")
    finally:
        raw.close()


def foresee(url: str) -> str:
    """Return in words what to open the store would do. It leaves nothing behind.

    Raises SQLAlchemyError, OSError, StoreVersionError as `open_engines` would.
    """
    address = _address(url)
    if address.get_backend_name() == "sqlite":
        path = Path(str(address.database))
        if not path.exists() or not path.stat().st_size:
            folder = next(one for one in path.absolute().parents if one.exists())
            with tempfile.TemporaryDirectory(prefix=".rankscope", dir=folder):
                return "will be made"
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} cannot be written by this user")
        address = address.set(
            database=f"file:{path.absolute()}", query={"mode": "rw", "uri": "true"}
        )
    engine = sa.create_engine(address, poolclass=sa.NullPool)
    with engine.connect() as connection:
        scripts = ScriptDirectory.from_config(_configuration())
        stored = _check_version(connection, scripts)
    newest = scripts.get_current_head()
    if stored == newest:
        return f"tables of version {newest}"
    return f"tables of version {stored or 'none'}, will be brought to {newest}"


def _configuration() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _address(url: str) -> sa.URL:
    """Return the address with its driver. Raises ImportError where that is not installed."""
    address = sa.make_url(url)
    if address.drivername in ("postgres", "postgresql"):
        address = address.set(drivername="postgresql+psycopg")
    if address.get_driver_name() == "psycopg" and importlib.util.find_spec("psycopg") is None:
        raise ImportError("PostgreSQL needs its driver: pip install 'rankscope[server,postgres]'")
    return address


def _check_version(connection: sa.Connection, scripts: ScriptDirectory) -> str | None:
    """Return the version of the tables; None where there are none. Raises StoreVersionError."""
    found = connection.dialect.server_version_info or ()
    where = connection.engine.url.render_as_string()  # without its password
    if connection.dialect.name == "postgresql" and found < (OLDEST_POSTGRES,):
        raise StoreVersionError(
            f"{where} is PostgreSQL {'.'.join(map(str, found))}; update it to "
            f"{OLDEST_POSTGRES} or newer"
        )
    names = set(sa.inspect(connection).get_table_names())
    if not names:
        return None
    choose = "choose another --data-dir or --database-url"
    heads = MigrationContext.configure(connection).get_current_heads()
    if not heads:
        raise StoreVersionError(
            f"{where} has tables of another program ({', '.join(sorted(names)[:3])}); {choose}"
        )
    newest = str(scripts.get_current_head())
    stored = heads[0]
    if stored not in {script.revision for script in scripts.walk_revisions()}:
        if _VERSION.match(stored) and stored[:4] > newest[:4]:
            raise StoreVersionError(
                f"a newer version of Rankscope made the tables of {where} (version {stored}, this "
                f"one knows {newest}); update Rankscope, or {choose}"
            )
        raise StoreVersionError(
            f"the tables of {where} are of version {stored}, which no release of Rankscope has; "
            f"{choose}, or serve it with what made it"
        )
    if stored == newest and (missing := _missing(connection, names)):
        raise StoreVersionError(
            f"the tables of {where} say that they are of version {stored}, but {missing} is "
            f"missing: restore a copy, or {choose}"
        )
    return stored


def _missing(connection: sa.Connection, names: set[str]) -> str:
    """Return the first table or column that a database of the newest version lacks, or nothing."""
    there = set(map(tuple, connection.exec_driver_sql(_COLUMNS[connection.dialect.name])))
    for table in metadata.sorted_tables:
        if table.name not in names:
            return f"table {table.name}"
        for name in table.columns.keys():
            if (table.name, name) not in there:
                return f"column {name} of {table.name}"
    return ""


@contextmanager
def only_server(url: str) -> Iterator[None]:
    """Hold the lock of an SQLite file while the server lives; the kernel frees it at any death.

    Raises StoreInUseError where another process holds it.
    """
    address = sa.make_url(url)
    if address.get_backend_name() != "sqlite" or not address.database:
        yield
        return
    path = Path(address.database + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise StoreInUseError(
                f"{address.database} is in use by process {file.read().strip() or 'unknown'}; "
                "stop that server or choose another --data-dir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def explain(error: BaseException) -> StoreUnavailableError | None:
    """Return what a database error means for the sender, or None where it is a bug of ours."""
    if isinstance(error, StoreUnavailableError):
        return error
    kinds = sa.exc.OperationalError | sa.exc.InternalError | OSError
    is_damage = type(error) is sa.exc.DatabaseError  # the class above, which SQLite has for it
    if not (is_damage or isinstance(error, kinds)):
        return None
    text = str(getattr(error, "orig", error)).lower()
    if "full" in text or "no space" in text:
        return StoreUnavailableError(
            "the disk of the server is full", "free space; senders retry", cause="disk_full"
        )
    if "locked" in text or "busy" in text:
        return StoreUnavailableError("the database is locked", "stop what else writes to it")
    if "readonly" in text or "read-only" in text:
        return StoreUnavailableError("the database is read-only", "give the server write access")
    if "malformed" in text or "not a database" in text:
        return StoreUnavailableError(
            "the database file is damaged", "restore it from a copy", cause="damaged"
        )
    if "i/o error" in text or "unable to open" in text:
        return StoreUnavailableError("the database file cannot be used", "check its disk")
    if "deadlock" in text:
        return StoreUnavailableError("two servers waited for each other", "send again")
    is_cut = getattr(error, "connection_invalidated", False)
    if is_cut or "connect" in text or "server closed" in text:
        return StoreUnavailableError("the database cannot be reached", "check that it runs")
    return None


def is_rolled_back(error: BaseException) -> bool:
    """Return whether the database undid the transaction for what is over when it is repeated."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) in _ROLLED_BACK


def upsert(
    connection: sa.Connection,
    table: sa.Table,
    rows: list[dict[str, Any]],
    update: tuple[str, ...] = (),
) -> None:
    """Insert rows; where the primary key exists take over the columns `update` of the new row."""
    if rows:
        connection.execute(_upsert(connection.dialect.name, table, update), rows)


@cache  # to build it costs more than to run it
def _upsert(dialect: str, table: sa.Table, update: tuple[str, ...]) -> sa.Executable:
    insert: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table)
    keys = list(table.primary_key.columns)
    if not update:
        done: sa.Executable = statement.on_conflict_do_nothing(index_elements=keys)
        return done
    new = statement.excluded
    done = statement.on_conflict_do_update(
        index_elements=keys, set_={name: new[name] for name in update}
    )
    return done


def _server(address: sa.URL, pool_size: int, **options: Any) -> sa.Engine:
    """Return an engine of a database server; a connection that died is replaced unseen."""
    return sa.create_engine(
        address,
        pool_size=pool_size,
        max_overflow=0 if pool_size == 1 else MORE_READERS,
        pool_pre_ping=True,
        **options,
    )


def _writing(address: sa.URL) -> sa.Engine:
    """Return an engine of one connection that writes."""
    engine = _server(address, pool_size=1)
    if address.get_backend_name() == "postgresql":

        @sa.event.listens_for(engine, "connect")
        def on_connect(connection: Any, _record: Any) -> None:
            limit_ms = int(STOPPED_SECONDS * 1e3)
            connection.execute(f"SET idle_in_transaction_session_timeout = {limit_ms}")
            connection.commit()

        @sa.event.listens_for(engine, "handle_error")
        def on_error(context: sa.engine.ExceptionContext) -> None:
            # A server that takes no writes any more is asked for by a new connection, which a
            # proxy may lead to the one that took its place; this one would stay as it is.
            if getattr(context.original_exception, "sqlstate", None) == _ONLY_READS:
                context.is_disconnect = True

    return engine


@cache
def _binary_cursor() -> Any:
    """Return a cursor of psycopg that takes values as they are: as text, blobs are twice as long.

    For reading our tables alone: what SQLAlchemy asks the catalogue for, it wants as text. Only
    here is psycopg imported, which is installed where PostgreSQL is used.
    """
    import psycopg

    class BinaryCursor(psycopg.Cursor[Any]):
        """Asks for results in binary form."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.format = psycopg.pq.Format.BINARY

    return BinaryCursor


def _sqlite(address: sa.URL, synchronous: str, begin: str, pool_size: int) -> sa.Engine:
    engine = sa.create_engine(
        address,
        pool_size=pool_size,
        max_overflow=0 if pool_size == 1 else MORE_READERS,
        connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS},
    )

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin on its own: we do, below
        cursor = connection.cursor()
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file; before all else
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA journal_size_limit={WAL_LIMIT_BYTES}")
        # else some builds write each page that is freed: the log would grow by what is deleted
        cursor.execute("PRAGMA secure_delete=FAST").fetchall()
        cursor.execute(f"PRAGMA synchronous={'FULL' if synchronous == 'full' else 'NORMAL'}")
        cursor.execute("PRAGMA busy_timeout=10000")
        cursor.execute("PRAGMA cache_size=-16000")
        cursor.execute("PRAGMA temp_store=MEMORY")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
