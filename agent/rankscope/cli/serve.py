"""`rankscope serve`: the server, where its extra is installed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from typing import ClassVar


class ServeCommand:
    """Start the server: ingest, diagnosis, search, API and dashboard.

    By default it listens on loopback and keeps an embedded database in the user's data
    directory; nothing else has to be installed. All flags: rankscope serve --help.
    """

    name: ClassVar[str] = "serve"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Leave all flags to the server, which has one table of its settings."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the server until it is stopped. Returns its exit code."""
        if importlib.util.find_spec("fastapi") is None:
            sys.stderr.write(
                "rankscope serve needs the server's packages: pip install 'rankscope[server]'\n"
            )
            return 1
        # by name: the agent package imports no other, and stays light where there is no server
        server = importlib.import_module("rankscope_server")
        code: int = server.serve(arguments.arguments)
        return code
