"""SQL over the tables of a run: DuckDB, on this machine, over files that it alone may read.

A statement is a SELECT. It reaches no other file, no network and no settings, takes the memory and
the time that it is given, and is stopped beyond them.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa

from rankscope.data.files import write
from rankscope.data.kinds import KINDS, DataError, Progress, schema_of

MEMORY_BYTES = 2 << 30
_ROWS_AT_ONCE = 100_000
Fetch = Callable[[str, Progress], Iterator[pa.RecordBatch]]
TableProgress = Callable[[str, int, int | None], None]


class Tables:
    """The tables of a run for statements; those that were read before are not read again."""

    def __init__(
        self,
        fetch: Fetch,
        *,
        memory_bytes: int = MEMORY_BYTES,
        progress: TableProgress = lambda table, done, total: None,
    ) -> None:
        self._fetched, self._progress = fetch, progress
        self._memory_bytes = memory_bytes
        self._folder = tempfile.TemporaryDirectory(prefix="rankscope-sql-")
        self._known: set[str] = set()

    def __enter__(self) -> Tables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Remove what was fetched."""
        self._folder.cleanup()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except duckdb.Error as error:
            raise DataError(str(error)) from error

    def select(self, query: str, *, seconds: float) -> Result:
        """Begin a SELECT. Raises DataError where it is none, or is wrong."""
        with self._errors():
            for table in sorted(_tables_in(query)):
                self._fetch(table)
            return Result(self._connection(), query, seconds)

    def _fetch(self, table: str) -> None:
        if table in self._known:
            return
        batches = self._fetched(table, lambda done, total: self._progress(table, done, total))
        write(batches, schema_of(table), self._path(table))
        self._known.add(table)

    def _path(self, table: str) -> Path:
        return Path(self._folder.name) / f"{table}.parquet"

    def _connection(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(
            config={
                "memory_limit": f"{self._memory_bytes}B",
                "temp_directory": str(Path(self._folder.name) / "spill"),
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            }
        )
        for table in KINDS:
            if table in self._known:
                connection.read_parquet(str(self._path(table))).create_view(table)
            else:
                connection.from_arrow(schema_of(table).empty_table()).create(table)
        folder = self._folder.name.replace("'", "''")
        connection.execute(f"SET allowed_directories = ['{folder}']")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        return connection


class Result:
    """What a statement finds; read once, as one of these."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, query: str, seconds: float) -> None:
        self._connection, self._query, self._seconds = connection, query, seconds

    def to_arrow_table(self) -> pa.Table:
        """Return all rows. Raises DataError."""
        with self._running() as found:
            return found.to_arrow_table()

    @contextlib.contextmanager
    def reader(self) -> Iterator[pa.RecordBatchReader]:
        """Yield a reader of all rows, in the memory of one batch. Raises DataError."""
        with self._running() as found:
            yield found.to_arrow_reader(_ROWS_AT_ONCE)

    @contextlib.contextmanager
    def _running(self) -> Iterator[Any]:
        """Run the statement, and stop it when its time is over."""
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            self._connection.interrupt()

        clock = threading.Timer(self._seconds, stop)
        clock.daemon = True
        clock.start()
        try:
            yield self._connection.sql(self._query)
        except duckdb.Error as error:
            if is_late.is_set():
                raise DataError(
                    f"stopped: it took longer than {self._seconds:g} s; narrow it, or give more"
                ) from error
            raise DataError(str(error)) from error
        finally:
            clock.cancel()


def _tables_in(query: str) -> set[str]:
    """Return the tables that a statement reads. Raises DataError unless it is one SELECT."""
    with duckdb.connect(config={"enable_external_access": "false"}) as parser:
        (text,) = parser.execute("SELECT json_serialize_sql(?)", [query]).fetchone() or ("{}",)
    tree = json.loads(text)
    if tree.get("error_type") == "parser":
        raise DataError(tree["error_message"])
    if len(tree.get("statements", ())) != 1:
        raise DataError("it is to be one SELECT: nothing else is run, tables are only read")
    return {name for name in _names_in(tree) if name in KINDS}


def _names_in(node: Any) -> Iterator[str]:
    """Yield the names of tables in the tree of a statement, and of what it calls so itself."""
    if isinstance(node, dict):
        if node.get("type") == "BASE_TABLE":
            yield node["table_name"].lower()
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _names_in(part)
