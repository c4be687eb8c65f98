"""What `rankscope sql` and `rankscope export` have in common: which rows, from where, how far."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rankscope.terminal import SafeConsole, shown

EXIT_FAILED = 2
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)
NEEDS = "needs pyarrow and duckdb: pip install 'rankscope[data]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument(
        "--steps", type=one_range, metavar="FROM-TO", help="of collectives and steps, only these"
    )
    parser.add_argument(
        "--ranks", type=ranges, default=(), metavar="0-7,12", help="the same of ranks"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="one attempt only")
    parser.add_argument(
        "--server", default="", metavar="URL", help="default $RANKSCOPE_SERVER, else this machine"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def one_range(text: str) -> tuple[int, int]:
    """Return both ends of "5-9", or of "5"."""
    found = _RANGE.fullmatch(text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r} is no range: write 100-200")
    return low, high


def ranges(text: str) -> list[tuple[int, int]]:
    """Return both ends of each part of "0-7,12"."""
    return [one_range(part) for part in text.split(",")]


def load(name: str) -> Any:
    """Return a module of `rankscope.data`. Raises ImportError, which says what to install."""
    try:
        return importlib.import_module(f"rankscope.data.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rankscope"):
            raise
        raise ImportError(NEEDS) from error


def refuse(command: str, text: str, code: int) -> int:
    """Say why there is no answer; return the exit code."""
    sys.stderr.write(f"rankscope {command}: {shown(text)}\n")
    return code


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show on stderr what is not complete, and on a terminal how far reading is."""
    console = SafeConsole(stderr=True)
    with (
        warnings.catch_warnings(),
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"),
            console=console, transient=True, disable=not sys.stderr.isatty(),
        ) as progress,
    ):  # fmt: skip
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: console.print(
            shown(str(message)), markup=False, highlight=False, soft_wrap=True
        )
        tasks: dict[str, Any] = {}

        def on_page(table: str, done: int, total: int | None) -> None:
            if table not in tasks:
                tasks[table] = progress.add_task(table, total=total)
            progress.update(tasks[table], completed=done)

        yield on_page
