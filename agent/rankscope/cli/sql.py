"""`rankscope sql`: a SELECT over everything that is stored of a run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from rankscope.cli import EXIT_INTERRUPTED, EXIT_USAGE, tables
from rankscope.cli.tables import EXIT_FAILED
from rankscope.terminal import SafeConsole, one_line, shown

_MIB = 1 << 20
_SHOWN_ROWS = 50


class SqlCommand:
    """Ask a run in SQL: every collective, step, sample, metric, log line and finding is a row.

    QUERY is one SELECT in the dialect of DuckDB. The tables that it names are fetched from the
    server, and it runs here: it reads no other file and no network, and changes nothing. What is
    not known is NULL; *_ns are nanoseconds. "show tables" and "describe steps" list what there is.

    Examples:
      rankscope sql my-run "show tables"
      rankscope sql my-run "select rank, count(*), median(duration_ns) / 1e6 as ms
                            from collectives where operation = 'all_reduce'
                            group by rank order by ms desc limit 10"
      rankscope sql my-run "select * from steps" --steps 400-500 --ranks 3,7 --out steps.csv
      rankscope sql my-run "select * from errors order by time_ns" --json

    Exit codes: 0 answered, also with no rows; 2 the server cannot be reached or does not know the
    run, or the query is wrong, writes, or takes too long; 64 wrong usage; 130 Ctrl-C.
    It needs pip install 'rankscope[data]'. A token for the server is taken from RANKSCOPE_TOKEN
    only.
    """

    name: ClassVar[str] = "sql"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("run", metavar="RUN", help="id of the run")
        parser.add_argument("query", metavar="QUERY", help="one SELECT")
        parser.add_argument(
            "--out", type=Path, metavar="FILE",
            help="write all rows to FILE.parquet, FILE.arrow, FILE.csv or FILE.jsonl",
        )  # fmt: skip
        parser.add_argument(
            "--limit", type=int, default=_SHOWN_ROWS, metavar="N",
            help=f"most rows that are shown on a terminal (default: {_SHOWN_ROWS})",
        )  # fmt: skip
        parser.add_argument(
            "--seconds", type=float, default=300.0, metavar="S",
            help="stop the query after so long (default: 300)",
        )  # fmt: skip
        parser.add_argument(
            "--memory-mib", type=int, default=2_048, metavar="MIB",
            help="most memory of the query (default: 2048); it spills to disk beyond",
        )  # fmt: skip
        tables.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Fetch, ask, print. Returns the exit code."""
        if not (arguments.seconds > 0 and arguments.memory_mib >= 64):
            return tables.refuse("sql", "--seconds above 0, --memory-mib of 64 or more", EXIT_USAGE)
        try:
            data, sql, kinds = (tables.load(name) for name in ("run", "sql", "kinds"))
        except ImportError as error:
            return tables.refuse("sql", str(error), EXIT_USAGE)
        part = kinds.Part(arguments.steps, arguments.ranks, arguments.attempt)
        try:
            with (
                data.open_run(arguments.run, server=arguments.server) as run,
                tables.shown_progress() as progress,
                sql.Tables(
                    lambda table, on_page: run.batches(table, part, progress=on_page),
                    memory_bytes=arguments.memory_mib * _MIB,
                    progress=progress,
                ) as fetched,
            ):
                result = fetched.select(arguments.query, seconds=arguments.seconds)
                if arguments.out:
                    found: Any = _write(result, arguments.out)
                else:
                    found = result.to_arrow_table()
        except (kinds.DataError, OSError) as error:
            return tables.refuse("sql", str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        if arguments.out:
            _say_written(arguments.out, found, as_json=arguments.json)
        elif arguments.json:
            columns = found.to_pydict().values()
            rows = [[_in_json(cell) for cell in row] for row in zip(*columns, strict=True)]
            print(json.dumps({"columns": found.column_names, "rows": rows}, default=str))
        else:
            _show(found, arguments.limit)
        return 0


def _write(result: Any, path: Path) -> int:
    files = tables.load("files")
    files.format_of(path)
    with result.reader() as reader:
        num_rows: int = files.write(reader, reader.schema, path)
    return num_rows


def _say_written(path: Path, num_rows: int, *, as_json: bool) -> None:
    size = path.stat().st_size
    if as_json:
        print(json.dumps({"file": str(path), "rows": num_rows, "bytes": size}))
    else:
        print(f"{shown(str(path))}: {num_rows:,} rows, {size:,} bytes")


def _show(found: Any, limit: int) -> None:
    """Print the first rows as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for field in found.schema:
        is_number = str(field.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(
            one_line(field.name), overflow="fold", justify="right" if is_number else "left"
        )
    for row in found.slice(0, limit).to_pylist():
        table.add_row(*(_cell(value) for value in row.values()))
    console = SafeConsole(highlight=False)
    console.print(table)
    if found.num_rows > limit:
        sys.stderr.write(
            f"the first {limit:,} of {found.num_rows:,} rows; --limit N shows more, --out FILE "
            "writes all\n"
        )


def _in_json(value: Any) -> Any:
    """Return a value as JSON may say it: NaN and infinity are none of its numbers."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else one_line(value)
