"""`rankscope completion`: what a shell needs to complete our commands, made by shtab."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import ClassVar

from rankscope.cli import all_commands

_SHELLS = ("bash", "zsh", "tcsh", "fish")


class CompletionCommand:
    """Print the script with which a shell completes commands, options and files.

    Examples:
      eval "$(rankscope completion bash)"         in ~/.bashrc
      rankscope completion zsh > ~/.zfunc/_rankscope
      rankscope completion tcsh > ~/.rankscope.tcsh
      rankscope completion fish > ~/.config/fish/completions/rankscope.fish

    It needs shtab: pip install 'rankscope[completion]'
    """

    name: ClassVar[str] = "completion"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("shell", choices=_SHELLS, help="the shell that will read it")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the script; 1 where shtab is not installed."""
        if importlib.util.find_spec("shtab") is None:
            sys.stderr.write(
                "rankscope completion needs shtab: pip install 'rankscope[completion]'\n"
            )
            return 1
        import shtab

        parser, subparsers = all_commands()
        add_server_flags(subparsers["serve"])
        for command in subparsers.values():
            for action in command._actions:
                _complete_paths(action, file=shtab.FILE, folder=shtab.DIRECTORY)
        sys.stdout.write(shtab.complete(parser, arguments.shell).rstrip() + "\n")
        return 0


def add_server_flags(serve: argparse.ArgumentParser) -> None:
    """Give the parser of `serve` the flags that the server itself reads."""
    if importlib.util.find_spec("rankscope_server") is not None:
        importlib.import_module("rankscope_server.settings").add_flags(serve)


def _complete_paths(action: argparse.Action, *, file: object, folder: object) -> None:
    """Say of an option, by the name of its value, that it takes paths."""
    shown = str(action.metavar or "")
    if "DIR" in shown:
        action.complete = folder  # type: ignore[attr-defined]
    elif action.type is Path or any(word in shown for word in ("FILE", "PATH", "COMMAND")):
        action.complete = file  # type: ignore[attr-defined]
