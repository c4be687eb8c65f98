"""The command line: one module per command, in the order in which people meet them."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar, NoReturn, Protocol

EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 3, 64, 130

_MODULES: tuple[tuple[str, str], ...] = (
    ("rankscope.cli.demo", "DemoCommand"),
    ("rankscope.cli.run", "RunCommand"),
    ("rankscope.cli.preflight", "PreflightCommand"),
    ("rankscope.cli.plan", "PlanCommand"),
    ("rankscope.cli.what_if", "WhatIfCommand"),
    ("rankscope.cli.doctor", "DoctorCommand"),
    ("rankscope.cli.serve", "ServeCommand"),
    ("rankscope.cli.explain", "ExplainCommand"),
    ("rankscope.cli.report", "ReportCommand"),
    ("rankscope.cli.watch", "WatchCommand"),
    ("rankscope.cli.search", "SearchCommand"),
    ("rankscope.cli.ask", "AskCommand"),
    ("rankscope.cli.mcp", "McpCommand"),
    ("rankscope.cli.runs", "RunsCommand"),
    ("rankscope.cli.diff", "DiffCommand"),
    ("rankscope.cli.sql", "SqlCommand"),
    ("rankscope.cli.export", "ExportCommand"),
    ("rankscope.cli.import_", "ImportCommand"),
    ("rankscope.cli.track", "TrackCommand"),
    ("rankscope.cli.alerts", "AlertsCommand"),
    ("rankscope.cli.advice", "AdviceCommand"),
    ("rankscope.cli.token", "TokenCommand"),
    ("rankscope.cli.backup", "BackupCommand"),
    ("rankscope.cli.restore", "RestoreCommand"),
    ("rankscope.cli.completion", "CompletionCommand"),
    ("rankscope.cli.man", "ManCommand"),
    ("rankscope.cli.uninstall", "UninstallCommand"),
)
_USUAL_NAMES = {  # what people type who know other tools; no second name for one command
    "show": "watch RUN --once, or report RUN",
    "tail": "search --run RUN --follow",
    "logs": "search --run RUN",
    "status": "watch --once",
    "list": "runs list",
    "ls": "runs list",
    "compare": "diff A B",
}
_PASS_ON = frozenset({"serve"})  # commands whose flags another package parses


class Command(Protocol):
    """One command; the class docstring is its help text."""

    name: ClassVar[str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's flags."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code."""


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for usage errors and the way to the help.

    An option is written out: what abbreviates one today abbreviates two with the next version.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and how to find out what is right."""
        from rankscope.terminal import shown

        sys.stderr.write(f"{self.prog}: {shown(message)}\nTry: {self.prog} --help\n")
        raise SystemExit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when we began, as by `2>&-`
            setattr(sys, name, open(os.devnull, "w"))
        if isinstance(stream, io.TextIOWrapper):  # a terminal without a sign must not end us
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if argv is None else argv)
    from rankscope.cli import json_errors

    try:
        return json_errors.run(words, lambda parsed: _run(words, parsed))
    except KeyboardInterrupt:
        if words[:1] != ["preflight"]:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further one has nothing to end
        sys.stderr.write("rankscope preflight: interrupted\n")
        return EXIT_INCOMPLETE


def _run(words: list[str], parsed: Callable[[argparse.Namespace], None]) -> int:
    # What another command imports must not slow this one down: preflight runs on busy nodes.
    chosen = [row for row in _MODULES if words and _name_of(row[0]) == words[0]]
    commands = [_load(*row) for row in chosen or _MODULES]
    parser, subparsers = _parser(commands)
    if words and words[0] in _USUAL_NAMES:
        parser.error(f"{words[0]} is called: rankscope {_USUAL_NAMES[words[0]]}")
    if words and words[0] in _PASS_ON:
        arguments = argparse.Namespace(command=words[0], arguments=words[1:])
    else:
        arguments, unknown = parser.parse_known_args(words)
        if unknown:  # by the command's own parser: its help is the right one
            subparsers[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    parsed(arguments)
    (command,) = (command for command in commands if command.name == arguments.command)
    return command.run(arguments)


def all_commands() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and that of each command."""
    return _parser([_load(*row) for row in _MODULES])


def _parser(commands: Sequence[Command]) -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="rankscope",
        description="Watch, explain and search distributed PyTorch runs.",
        epilog="rankscope COMMAND --help shows more. Start with: rankscope demo",
    )
    from rankscope import __version__

    parser.add_argument("--version", action="version", version=f"rankscope {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        text = inspect.cleandoc(type(command).__doc__ or "")
        sub = subparsers.add_parser(
            command.name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=command.name not in _PASS_ON,
        )
        command.add_arguments(sub)
    return parser, subparsers.choices


def _name_of(module: str) -> str:
    return module.rpartition(".")[2].rstrip("_").replace("_", "-")


def _load(module: str, kind: str) -> Command:
    command: Command = getattr(import_module(module), kind)()
    return command
