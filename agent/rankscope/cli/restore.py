"""`rankscope restore`: a copy of a store becomes one again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from rankscope.cli.backup import add_store, run


class RestoreCommand:
    """Make a copy of `rankscope backup` the store of a server that is stopped.

    The store must be empty. With --overwrite one that is there is replaced: the embedded database
    is kept beside the new one, the tables of PostgreSQL are not. A copy of an older version is
    brought to this one when the server starts. Where it fails, the store is as it was.

    Examples:
      rankscope restore rankscope-2026-11-28.backup
      rankscope restore rankscope.backup --data-dir /var/lib/rankscope --overwrite

    Exit codes: 0 restored; 2 not, with the reason; 64 wrong usage.
    """

    name: ClassVar[str] = "restore"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("file", type=Path, metavar="FILE", help="the copy")
        add_store(parser, "replace what the store holds")

    def run(self, arguments: argparse.Namespace) -> int:
        """Put the copy in its place. Returns the exit code."""
        return run("restore", arguments, arguments.file)
