"""`rankscope man`: the manual page of all commands, made from their parsers by argparse-manpage."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from typing import ClassVar

from rankscope import __version__
from rankscope.cli import all_commands
from rankscope.cli.completion import add_server_flags

_LIST = ".SH\nPOSITIONAL ARGUMENTS"


class ManCommand:
    """Print the manual page, in the form that man reads.

    Examples:
      rankscope man | man -l -
      rankscope man > ~/.local/share/man/man1/rankscope.1

    It needs argparse-manpage: pip install 'rankscope[completion]'
    """

    name: ClassVar[str] = "man"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the page; 1 where the library is not installed."""
        if importlib.util.find_spec("argparse_manpage") is None:
            sys.stderr.write(
                "rankscope man needs argparse-manpage: pip install 'rankscope[completion]'\n"
            )
            return 1
        parser, subparsers = all_commands()
        add_server_flags(subparsers["serve"])
        about = {
            "description": parser.description, "project_name": "rankscope",
            "version": __version__, "manual_title": "Rankscope",
        }  # fmt: skip
        library = importlib.import_module("argparse_manpage.manpage")
        page = str(library.Manpage(parser, about, format="single-commands-section"))
        sys.stdout.write(mended(page))
        return 0


def mended(page: str) -> str:
    """Return a page of the library whose examples stay as they are written.

    Neither adjusted nor hyphenated; a line that begins with a quote is no request of roff.
    """
    head, _, rest = page.partition("\n")
    rest = re.sub(r"^'", r"\\&'", rest, flags=re.MULTILINE)
    return f"{head}\n.nh\n.ad l\n{rest.replace(_LIST, '.SH COMMANDS')}"
