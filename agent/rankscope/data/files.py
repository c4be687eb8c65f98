"""Tables as files: Parquet, Arrow, CSV, JSON lines. Memory is that of one group of rows."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from rankscope.data.kinds import DataError

_ROWS_IN_GROUP = 250_000
FORMATS: tuple[str, ...] = ("parquet", "arrow", "csv", "jsonl")


def format_of(path: Path) -> str:
    """Return the format of a file by its ending. Raises DataError."""
    found = path.suffix.removeprefix(".").lower()
    if found not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise DataError(f"{path} does not say its format: end its name with one of {endings}")
    return found


def write(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: Path) -> int:
    """Write rows to a file that is there whole or not at all; return how many.

    The format is that of its ending. Raises DataError and OSError.
    """
    format_name = format_of(path)
    # columns of words are text in files of text
    plain = pa.schema(
        [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
         for field in schema]
    )  # fmt: skip
    target = schema if format_name in ("parquet", "arrow") else plain
    part = path.with_name(f".{path.stem}.part.{format_name}")
    num_rows = 0
    try:
        with contextlib.closing(_writer(format_name, part, target)) as writer:
            for table in _groups(batches, schema):
                writer.write_table(table.cast(target))
                num_rows += table.num_rows
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return num_rows


def _writer(format_name: str, path: Path, schema: pa.Schema) -> Any:
    if format_name == "parquet":
        return pq.ParquetWriter(path, schema, compression="zstd")
    if format_name == "arrow":
        options = pa.ipc.IpcWriteOptions(compression="zstd", unify_dictionaries=True)
        return pa.ipc.new_file(str(path), schema, options=options)
    if format_name == "csv":
        return pa_csv.CSVWriter(str(path), schema)
    return _JsonLines(path)


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows in tables of many of them: small groups make large and slow files."""
    waiting, num_rows = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        num_rows += batch.num_rows
        if num_rows >= _ROWS_IN_GROUP:
            yield pa.Table.from_batches(waiting, schema).unify_dictionaries()
            waiting, num_rows = [], 0
    yield pa.Table.from_batches(waiting, schema).unify_dictionaries()


class _JsonLines:
    """Writes an object a line; what is not known is null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_table(self, table: pa.Table) -> None:
        """Write all rows."""
        for batch in table.to_batches(max_chunksize=10_000):
            lines = (json.dumps(row, default=str, ensure_ascii=False) for row in batch.to_pylist())
            self._file.writelines(f"{line}\n" for line in lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
