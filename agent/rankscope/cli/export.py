"""`rankscope export`: everything that is stored of a run, as files of other programs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from rankscope.cli import EXIT_INTERRUPTED, EXIT_USAGE, tables
from rankscope.cli.storage import size
from rankscope.cli.tables import EXIT_FAILED
from rankscope.terminal import SafeConsole, shown

_SUMMARY = "run.json"
_FORMATS = ("parquet", "arrow", "csv", "jsonl")


class ExportCommand:
    """Write what is stored of a run to files: Parquet, Arrow, CSV or JSON lines, a file a table.

    Without --tables every table that has rows is written, and run.json: the verdict and the numbers
    of the overview. Any engine reads the files: DuckDB, pandas, polars, Spark, ClickHouse.
    Their columns are in docs/data.md; what is not known is null. Each file is there whole or not
    at all; one that is there already is not replaced without --overwrite.

    Examples:
      rankscope export my-run --out my-run/
      rankscope export my-run --tables collectives,steps --steps 400-500 --out around-450/
      rankscope export my-run --tables logs,errors --format jsonl --out logs/

    Exit codes: 0 written; 2 the server cannot be reached or does not know the run, or a file
    cannot be written; 64 wrong usage; 130 Ctrl-C.
    It needs pip install 'rankscope[data]'. A token for the server is taken from RANKSCOPE_TOKEN
    only.
    """

    name: ClassVar[str] = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("run", metavar="RUN", help="id of the run")
        parser.add_argument(
            "--tables", type=lambda text: text.split(","), default=[], metavar="NAME,NAME",
            help="default: all that have rows",
        )  # fmt: skip
        parser.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="where to write; it is made"
        )
        parser.add_argument(
            "--format", choices=_FORMATS, default="parquet", help="default: parquet"
        )
        parser.add_argument("--overwrite", action="store_true", help="replace files of before")
        tables.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Fetch and write. Returns the exit code."""
        try:
            data, kinds, files = (tables.load(name) for name in ("run", "kinds", "files"))
        except ImportError as error:
            return tables.refuse("export", str(error), EXIT_USAGE)
        unknown = [name for name in arguments.tables if name not in kinds.KINDS]
        if unknown:
            known = ", ".join(kinds.KINDS)
            return tables.refuse("export", f"no table {unknown[0]!r}; one of {known}", EXIT_USAGE)
        chosen = arguments.tables or kinds.KINDS
        paths = {name: arguments.out / f"{name}.{arguments.format}" for name in chosen}
        there = [path for path in (*paths.values(), arguments.out / _SUMMARY) if path.exists()]
        if there and not arguments.overwrite:
            text = f"{there[0]} is there already: choose another --out, or say --overwrite"
            return tables.refuse("export", text, EXIT_USAGE)
        part = kinds.Part(arguments.steps, arguments.ranks, arguments.attempt)
        written: list[dict[str, Any]] = []
        try:
            with (
                data.open_run(arguments.run, server=arguments.server) as run,
                tables.shown_progress() as progress,
            ):
                arguments.out.mkdir(parents=True, exist_ok=True)
                for name, path in paths.items():
                    batches = run.batches(
                        name, part,
                        progress=lambda done, total, name=name: progress(name, done, total),
                    )  # fmt: skip
                    num_rows = files.write(batches, kinds.schema_of(name), path)
                    if not num_rows and not arguments.tables:
                        path.unlink()
                        continue
                    row = {"table": name, "file": str(path), "rows": num_rows}
                    written.append(row | {"bytes": path.stat().st_size})
                _write_json(arguments.out / _SUMMARY, run.summary())
        except (kinds.DataError, OSError) as error:
            return tables.refuse("export", str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        if arguments.json:
            print(json.dumps({"run": arguments.run, "files": written}))
        else:
            _show(written, arguments.out)
        return 0


def _write_json(path: Path, document: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def _show(written: list[dict[str, Any]], folder: Path) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("table")
    for heading in ("rows", "size"):
        table.add_column(heading, justify="right")
    for row in written:
        table.add_row(row["table"], f"{row['rows']:,}", size(row["bytes"]))
    console = SafeConsole(highlight=False)
    console.print(table)
    console.print(f"in {shown(str(folder))}, with {_SUMMARY}", markup=False, soft_wrap=True)
