"""`rankscope search`: log lines of one run or of all, as the page's search box finds them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from rich.cells import cell_len
from rich.text import Text

from rankscope.address import AddressError
from rankscope.cli import EXIT_INTERRUPTED, EXIT_USAGE
from rankscope.cli.storage import StorageClient, StorageFailed, client_of
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, one_line, shown

EXIT_NONE, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_PAGE = 500
_TAIL = 1_000
_MOST = 100_000
_SHOWN = 10  # values of each facet
_FACETS = ("run", "project", "level", "host", "rank", "logger", "stream")
_POLL_SECONDS, _PAUSE_SECONDS = 1.0, 5.0
_STYLES = {"CRITICAL": "bold red", "ERROR": "red", "WARNING": "yellow", "DEBUG": "dim"}


class SearchCommand:
    """Search the log lines of one run or of all; follow and count them.

    The query is that of the page: words, "a phrase", prefix*, -not, OR, /regex/, and
    rank:3-7 host:node-b level:>=warning step:400..500 since:-10m logger:train group:world,
    and over all runs run:ddp-* project:research.
    Without a query all lines. The newest lines are printed, oldest of them first; lines that
    ranks wrote alike stand there once, with the ranks.

    Examples:
      rankscope search 'level:>=error since:-1h'              in all runs
      rankscope search 'nan OR inf rank:3' --run my-run
      rankscope search --run my-run --follow                  like tail -f, all ranks at once
      rankscope search 'level:>=error' --follow               of all runs, as they come
      rankscope search 'nccl error' --facets                  in which runs, ranks, hosts
      rankscope search timeout --run my-run --json | jq -r .message

    Exit codes: 0 found; 1 nothing found; 2 the server cannot be reached or does not know the run;
    64 wrong usage, also of the query: it says at which character; 130 Ctrl-C.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "search"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("query", nargs="?", default="", metavar="QUERY", help="what to find")
        parser.add_argument("--run", default="", metavar="RUN", help="id of a run (default: all)")
        parser.add_argument(
            "--limit", type=_limit, default=100, metavar="N", help="most lines (default: 100)"
        )
        parser.add_argument(
            "--follow", action="store_true", help="print new lines as they come, until Ctrl-C"
        )
        parser.add_argument(
            "--facets", action="store_true", help="how many lines of which run, level, host, rank"
        )
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object for each line")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print what is found. Returns the exit code."""
        if arguments.follow and arguments.facets:
            return _refuse("--facets counts what is there: leave --follow out", EXIT_USAGE)
        try:
            settings = from_environment(os.environ)
            url = arguments.server or settings.server or DEFAULT_SERVER
            client = client_of(url, settings.token)
        except (SettingError, AddressError) as error:
            return _refuse(str(error), EXIT_USAGE)
        found = _Found(StorageClient(client), arguments.query, arguments.run)
        printed = _Printed(arguments.run, as_json=arguments.json)
        with contextlib.closing(client):
            try:
                if arguments.facets:
                    return _print_counts(found.counts(), as_json=arguments.json)
                printed.add(found.newest(arguments.limit))
                if arguments.follow:
                    for lines in found.following():
                        printed.add(lines)
            except StorageFailed as error:
                if error.at is not None:
                    return _refuse(f"{error}\n{_marked(arguments.query, *error.at)}", EXIT_USAGE)
                return _refuse(str(error), EXIT_UNREACHABLE)
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            except BrokenPipeError:  # `| head` has enough
                sys.stdout = open(os.devnull, "w")
        return 0 if printed.num_lines else EXIT_NONE


class _Found:
    """The lines that a server finds."""

    def __init__(
        self, client: StorageClient, query: str, run: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._client, self._query, self._sleep = client, query, sleep
        self._path = f"/runs/{quote(run, safe='')}/logs" if run else "/search"
        self._last_id = 0

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest lines, oldest first. Raises StorageFailed."""
        lines: list[dict[str, Any]] = []
        cursor = None
        while len(lines) < limit:
            page = self._ask(limit=min(limit - len(lines), _PAGE), cursor=cursor)
            if cursor is None:
                self._last_id = page.get("last_id", 0)
            lines += page["lines"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return lines[::-1]

    def counts(self) -> dict[str, Any]:
        """Return how many lines there are, and of which values. Raises StorageFailed."""
        page = self._ask(limit=1)
        names = {run["run_id"]: run["name"] for run in page.get("runs", [])}
        return {
            "total": page["total"], "is_at_least": page["is_at_least"], "facets": page["facets"],
            "run_names": names,
        }  # fmt: skip

    def following(self) -> Iterator[list[dict[str, Any]]]:
        """Yield new lines as they come, without an end. Raises StorageFailed."""
        while True:
            try:
                page = self._ask(limit=_TAIL, after=self._last_id)
            except StorageFailed as error:
                if error.status:
                    raise
                self._sleep(_PAUSE_SECONDS)  # a server that starts again is waited for
                continue
            self._last_id = max(self._last_id, page["last_id"])
            if page["is_behind"]:  # more came than one answer looks at: the newest of them
                yield self.newest(_PAGE)
            elif page["lines"]:
                yield page["lines"]
            if len(page["lines"]) < _TAIL:
                self._sleep(_POLL_SECONDS)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        query = {"q": self._query, **{k: v for k, v in asked.items() if v is not None}}
        return self._client.ask("GET", f"{self._path}?{urlencode(query)}")


@dataclass
class _Printed:
    """What stands on the screen."""

    run: str  # empty: each line says its run
    as_json: bool
    num_lines: int = 0

    def __post_init__(self) -> None:
        self._console = SafeConsole(highlight=False)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Print lines."""
        for line in lines:
            self.num_lines += 1
            if self.as_json:
                print(json.dumps(line), flush=True)
            else:
                self._console.print(self._text(line), soft_wrap=True)

    def _text(self, line: dict[str, Any]) -> Text:
        at = datetime.fromtimestamp(line["time_ms"] / 1e3).astimezone()
        run = "" if self.run else f"{one_line(line['run_id'])} "
        again = f"  \u00d7{line['count']}" if line["count"] > 1 else ""
        source = one_line(line["logger"] or line["stream"])
        level = line["level"]
        return Text.assemble(
            (f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03} {run}", "dim"),
            (f"{_author(line):<9} ", "cyan"),
            (f"{level:<8}", _STYLES.get(level, "")),
            (f" {source}: ", "dim"),
            shown(line["message"]),
            (again, "dim"),
        )


def _print_counts(counts: dict[str, Any], *, as_json: bool) -> int:
    """Print how many lines match, and of which values most. Returns the exit code."""
    if as_json:
        print(json.dumps(counts))
        return 0 if counts["total"] else EXIT_NONE
    console = SafeConsole(highlight=False)
    least = "at least " if counts["is_at_least"] else ""
    console.print(Text(f"{least}{counts['total']:,} lines"))
    names = counts["run_names"]
    for facet in _FACETS:
        values = counts["facets"].get(facet, [])
        if not values or (facet == "project" and len(values) == 1):
            continue
        console.print(Text(f"\n{facet}", "bold"))
        for value, number in values[:_SHOWN]:
            word = _facet_word(facet, value, names)
            console.print(Text.assemble((f"{number:>12,}", "cyan"), f"  {word}"), soft_wrap=True)
        if len(values) > _SHOWN:
            console.print(Text(f"{'':12}  and {len(values) - _SHOWN:,} more", "dim"))
    return 0 if counts["total"] else EXIT_NONE


def _facet_word(facet: str, value: Any, names: dict[str, str]) -> str:
    if facet == "rank":
        return f"rank {value}" if value >= 0 else "node"
    if facet == "run" and names.get(value, value) != value:
        return f"{one_line(names[value])} ({one_line(value)})"
    return one_line(value) or "(none)"


def _marked(query: str, begin: int, end: int) -> str:
    """Return the query with a mark under what is wrong in it."""
    before, wrong = _in_place(query[:begin]), _in_place(query[begin:end])
    mark = " " * cell_len(before) + "^" * max(cell_len(wrong), 1)
    return f"  {_in_place(query)}\n  {mark}"


def _in_place(text: str) -> str:
    """Return a text in one line in which nothing acts, each blank as one space."""
    return shown(re.sub(r"\s", " ", text))


def _author(line: dict[str, Any]) -> str:
    if len(line["ranks"]) > 1:
        return f"{len(line['ranks'])} ranks"
    return f"rank {line['rank']}" if line["rank"] >= 0 else "node"


def _limit(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST:,}")
    return number


def _refuse(text: str, exit_code: int) -> int:
    sys.stderr.write(f"rankscope search: {shown(text)}\n")
    return exit_code
