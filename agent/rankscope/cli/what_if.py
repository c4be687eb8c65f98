"""`rankscope what-if`: what a recorded run would take if it were laid out otherwise."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.cli.ask import DEFAULT_SERVER
from rankscope.cli.storage import StorageClient, StorageFailed, client_of
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, shown, shown_json

EXIT_NOT_KNOWN, EXIT_UNREACHABLE = 1, 2
_REFUSED = 422
# Options and query parameters: name, type, placeholder, what it says.
_CHANGES: tuple[tuple[str, type, str, str], ...] = (
    ("strategy", str, "NAME", "ddp, zero1, zero2 or fsdp in place of what it is"),
    ("add_nodes", int, "N", "so many nodes more, or fewer with a minus"),
    ("ranks_per_node", int, "N", "so many ranks on each node"),
    ("link_times", float, "X", "links so many times faster; slower below 1"),
    ("microbatches", int, "N", "a rank's samples of a step cut into so many"),
    ("bucket_mib", float, "MIB", "DDP's buckets of this size"),
    ("without", str, "RANKS", "these ranks, as in 3,17, as fast as their peers"),
)
_SAID: tuple[tuple[str, type, str, str], ...] = (
    ("layers", int, "N", "layers of the model, where no model under DDP reported them"),
    ("between", str, "RATE", "link of a rank to another node, as 25GB/s, where it ran on one"),
)
_ASKED: tuple[str, ...] = (*(row[0] for row in _CHANGES), "equal")
_GIVEN: tuple[str, ...] = (*_ASKED, *(row[0] for row in _SAID))


class WhatIfCommand:
    """Show what a recorded run would take if it were otherwise: a step, throughput, memory.

    The planner of `rankscope plan` gets what was measured of the run, so that its step of now is
    the measured one; ranks and buckets are answered by running the recorded steps again. With
    several changes they are made together; without any, each that makes sense is shown, best first.
    Every answer has a band and where it is from. What the run does not show is not guessed: the
    answer says what is missing.

    RUN is the id of a run on a server, or a directory as for `rankscope report`: then no server
    has to be up.

    Examples:
      rankscope what-if my-run                          what would help, best first
      rankscope what-if my-run --strategy fsdp          time and memory with cut weights
      rankscope what-if my-run --add-nodes 2 --link-times 2
      rankscope what-if my-run --microbatches 8 --bucket-mib 50
      rankscope what-if my-run --without 3 --json
      rankscope what-if my-run --add-nodes 1 --between 25GB/s     it ran on one node
      rankscope what-if /tmp/rankscope-0/my-run

    How each answer comes about, and how far such answers were from real runs: docs/plan.md.
    Exit codes: 0 there is an answer; 1 it is not known, and why; 2 the run cannot be read or
    reached; 64 wrong usage. A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "what-if"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("target", metavar="RUN|DIR", help="run id, or a directory")
        parser.add_argument(
            "--run", default="", metavar="RUN",
            help="which run of a folder that holds several; by default the newest",
        )  # fmt: skip
        for title, options in (("changes", _CHANGES), ("what is not recorded", _SAID)):
            group = parser.add_argument_group(title)
            for name, kind, place, text in options:
                flag = f"--{name.replace('_', '-')}"
                group.add_argument(flag, type=kind, metavar=place, help=text)
            if options is _CHANGES:
                text = "the work spread evenly over ranks and steps"
                group.add_argument("--equal", action="store_true", default=None, help=text)
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Ask and print. Returns the exit code."""
        given = {name: value for name in _GIVEN if (value := getattr(arguments, name)) is not None}
        try:
            if Path(arguments.target).exists():
                answer = _of_folder(arguments.target, arguments.run, given)
            else:
                answer = _of_server(arguments, given)
        except _Failed as error:
            sys.stderr.write(f"rankscope what-if: {shown(str(error))}\n")
            return error.exit_code
        if arguments.json:
            print(shown_json(json.dumps(answer)))
        else:
            from rankscope.cli.what_if_screen import show

            is_asked = any(name in given for name in _ASKED)
            show(answer, SafeConsole(highlight=False), is_asked=is_asked)
        is_known = any(one["step_ms"] is not None for one in answer["answers"])
        return 0 if is_known else EXIT_NOT_KNOWN


class _Failed(Exception):
    """There is no answer; the message says why."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _of_server(arguments: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings = from_environment(os.environ)
        client = client_of(arguments.server or settings.server or DEFAULT_SERVER, settings.token)
    except (SettingError, AddressError) as error:
        raise _Failed(str(error), EXIT_USAGE) from error
    words = {name: "true" if value is True else value for name, value in given.items()}
    path = f"/runs/{quote(arguments.target, safe='')}/what-if"
    with contextlib.closing(client):
        try:
            return StorageClient(client).ask("GET", f"{path}?{urlencode(words)}")
        except StorageFailed as error:
            code = EXIT_USAGE if error.status == _REFUSED else EXIT_UNREACHABLE
            raise _Failed(str(error), code) from error


def _of_folder(target: str, run_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    # by name: the agent package imports no other
    reporting = importlib.import_module("rankscope_server.report")
    try:
        answer: dict[str, Any] = reporting.what_if_of(target, run_id, dict(given))
    except reporting.WhatIfRefused as error:
        raise _Failed(str(error), EXIT_USAGE) from error
    except reporting.ReportError as error:
        raise _Failed(str(error), EXIT_UNREACHABLE) from error
    return answer
