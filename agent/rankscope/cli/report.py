"""`rankscope report`: a run on paper, verdict first, for who was not there."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import ClassVar

from rankscope.cli import EXIT_USAGE
from rankscope.cli.ask import DEFAULT_SERVER
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import shown

EXIT_UNREADABLE = 2


class ReportCommand:
    """Write a run down: who, why, at what cost, what next, and what would make it wrong.

    RUN is the id of a run on a server. DIR is a run's directory as the agent wrote it on a node
    (one of each node, if there are several), the folder that holds such directories, or a
    server's data folder; no server has to be up for these, and nothing in them is changed.

    Examples:
      rankscope report my-run
      rankscope report my-run --html report.html      one file, loads nothing, prints well
      rankscope report my-run --bundle report.zip     to mail: page, data, last lines, versions
      rankscope report /tmp/rankscope-0/my-run        a run that had no server
      rankscope report ~/.local/share/rankscope --run my-run --json

    The first screen has the verdict; what was not measured is said below it. Secrets are taken
    out by the rules of docs/privacy.md; what is in a bundle: docs/report.md.
    Exit codes: 0 the report is made; 2 the run cannot be read or reached, or a file cannot be
    written; 64 wrong usage. A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("target", nargs="+", metavar="RUN|DIR", help="run id, or directories")
        parser.add_argument(
            "--run", default="", metavar="RUN",
            help="which run of a folder that holds several; by default the newest",
        )  # fmt: skip
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        parser.add_argument("--html", type=Path, metavar="FILE", help="write the page")
        parser.add_argument("--bundle", type=Path, metavar="FILE", help="write the archive (zip)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read the run, write the report. Returns the exit code."""
        try:
            settings = from_environment(os.environ)
        except SettingError as error:
            sys.stderr.write(f"rankscope report: {shown(str(error))}\n")
            return EXIT_USAGE
        # by name: the agent package imports no other
        reporting = importlib.import_module("rankscope_server.report")
        wanted = reporting.Wanted(
            targets=tuple(arguments.target),
            run_id=arguments.run,
            server=arguments.server or settings.server or DEFAULT_SERVER,
            token=settings.token,
            is_json=arguments.json,
            html=arguments.html,
            bundle=arguments.bundle,
        )
        try:
            reporting.make_report(wanted)
        except reporting.ReportError as error:
            sys.stderr.write(f"rankscope report: {shown(str(error))}\n")
            return EXIT_UNREADABLE
        return 0
