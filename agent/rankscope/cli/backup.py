"""`rankscope backup`: a copy of a store that is in use."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

from rankscope.cli.storage import size
from rankscope.terminal import SafeConsole, shown

EXIT_FAILED = 2
_FLAGS = ("data_dir", "database_url", "config")


class BackupCommand:
    """Copy all that a server stores to one file, while it runs.

    The copy is as of one moment; the server takes and answers meanwhile. Of the embedded database
    it is a database of SQLite, of PostgreSQL an archive of pg_dump. It holds logs and hashes of
    tokens: only its owner may read it. Where the data of chunks is in objects (--blobs of the
    server), these are copied by the means of their store.

    Examples:
      rankscope backup --out rankscope-2026-11-28.backup
      rankscope backup --out /backups/rankscope.backup --overwrite --json
      rankscope backup --database-url postgresql://rankscope@db/rankscope --out rankscope.backup

    Exit codes: 0 there is a copy; 2 there is none, with the reason; 64 wrong usage. The store is
    found as `rankscope serve` finds it: by these flags, RANKSCOPE_SERVER_... or its file.
    """

    name: ClassVar[str] = "backup"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "--out", type=Path, required=True, metavar="FILE", help="where to write the copy"
        )
        parser.add_argument(
            "--without-objects", action="store_true",
            help="copy the database alone, where the data of chunks is in objects",
        )  # fmt: skip
        add_store(parser, "replace FILE where it is there")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the copy. Returns the exit code."""
        more = {"without_objects": arguments.without_objects}
        return run("backup", arguments, arguments.out, **more)


def add_store(parser: argparse.ArgumentParser, replaces: str) -> None:
    """Describe the options that `restore` has too."""
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the embedded database")
    parser.add_argument("--database-url", metavar="URL", help="address of a PostgreSQL database")
    parser.add_argument("--config", metavar="FILE", help="the file of settings of the server")
    parser.add_argument("--overwrite", action="store_true", help=replaces)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(what: str, arguments: argparse.Namespace, file: Path, **more: bool) -> int:
    """Do it with the server's part, and say what was done. Returns the exit code."""
    if importlib.util.find_spec("sqlalchemy") is None:
        sys.stderr.write(
            f"rankscope {what} needs the server's packages: pip install 'rankscope[server]'\n"
        )
        return EXIT_FAILED
    # by name: the agent package imports no other
    module = importlib.import_module("rankscope_server.backup")
    words = [
        word
        for name in _FLAGS
        if (value := getattr(arguments, name))
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    try:
        copied: Any = getattr(module, what)(
            words, dict(os.environ), file, overwrite=arguments.overwrite, **more
        )
    except module.BackupError as error:
        sys.stderr.write(f"rankscope {what}: {shown(str(error))}\n")
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps({"file": copied.file, "store": copied.store, "bytes": copied.bytes}))
    else:
        between = "is a copy of" if what == "backup" else "is now"
        SafeConsole(highlight=False).print(
            f"{copied.file} ({size(copied.bytes)}) {between} {copied.store}", markup=False,
            soft_wrap=True,
        )  # fmt: skip
    return 0
