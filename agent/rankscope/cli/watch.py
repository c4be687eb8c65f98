"""`rankscope watch`: a live run in the terminal: the answer, the numbers, its ranks worst first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankscope.address import AddressError
from rankscope.cli import EXIT_INTERRUPTED, EXIT_USAGE
from rankscope.cli.storage import StorageClient, StorageFailed, client_of, size
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, one_line, shown

EXIT_FAILED, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_OVER = ("ended", "failed")
_ROWS = 12  # of ranks, where the terminal's height is not known
_LINES_AROUND = 14  # of the answer, the findings and the heads
_MOST_FINDINGS = 4
_DOWN_SECONDS = 60.0  # a server that answers nothing for so long is gone
_STATES = {"failed": 0, "stuck": 1, "silent": 2}  # worst first; others after them
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_BAD_RATIO = 1.1  # from here on a row is marked
_COLUMNS = {"own_ratio": "slower", "own_ms": "self", "waiting_ratio": "waiting",
            "rank_memory": "memory"}  # fmt: skip


class WatchCommand:
    """Watch a run in the terminal: what is wrong, the numbers, its ranks worst first.

    Without RUN the newest live run, else the newest. It ends with the run; a run that is over is
    shown once. The columns are those of the page Parallelism, medians of the newest steps: how
    many times as long a rank works as the others of its role, its self time, and which share of
    its time it waits for others.

    Examples:
      rankscope watch
      rankscope watch my-run --server http://head:8787
      rankscope watch my-run --once                one look, for scripts and for CI
      rankscope watch my-run --once --json

    Exit codes: 0 the run is over, or --once; 1 it failed, or a finding is critical; 2 the server
    cannot be reached or does not know the run; 64 wrong usage; 130 Ctrl-C.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "watch"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("run", nargs="?", default="", metavar="RUN", help="id of the run")
        parser.add_argument("--once", action="store_true", help="look once and end")
        parser.add_argument(
            "--every", type=_seconds, default=2.0, metavar="SECONDS", help="default: 2"
        )
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object for each look")

    def run(self, arguments: argparse.Namespace) -> int:
        """Look until the run is over. Returns the exit code."""
        try:
            settings = from_environment(os.environ)
            url = arguments.server or settings.server or DEFAULT_SERVER
            client = client_of(url, settings.token)
        except (SettingError, AddressError) as error:
            return _refuse(str(error), EXIT_USAGE)
        with contextlib.closing(client):
            try:
                watching = Watching(StorageClient(client), arguments.run)
                with _screen_of(arguments, url) as screen:
                    last = watching.watch(screen.show, arguments.every, once=arguments.once)
            except StorageFailed as error:
                return _refuse(str(error), EXIT_UNREACHABLE)
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
        return EXIT_FAILED if last.is_bad else 0


@dataclass(frozen=True)
class Seen:
    """What the server says of a run at one moment."""

    page: dict[str, Any]  # as of `GET /runs/{run}`
    findings: list[dict[str, Any]]  # that are open, worst first
    ranks: list[dict[str, Any]]
    numbers: dict[int, dict[str, float | None]]  # rank -> column of `_COLUMNS` -> value

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is to come."""
        return self.page["run"]["status"] in _OVER

    @property
    def is_bad(self) -> bool:
        """Return whether a script should stop here."""
        verdict = self.page["verdict"]
        is_critical = verdict is not None and verdict["severity"] == "critical"
        return bool(is_critical or self.page["run"]["status"] == "failed")

    def worst_first(self) -> list[dict[str, Any]]:
        """Return the ranks: stuck and lost ones, those that the verdict accuses, slow ones."""
        accused = set((self.page["verdict"] or {}).get("ranks", ()))

        def order(row: dict[str, Any]) -> tuple[int, bool, float, int]:
            ratio = self.numbers.get(row["rank"], {}).get("own_ratio") or 0.0
            return _STATES.get(row["state"], 3), row["rank"] not in accused, -ratio, row["rank"]

        return sorted(self.ranks, key=order)


class Watching:
    """Looks at one run of a server; without an id at the newest live one, else the newest."""

    def __init__(
        self, client: StorageClient, run: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client, self._sleep = client, sleep
        self._path = f"/runs/{quote(run or self._newest(), safe='')}"

    def watch(self, show: Callable[[Seen], None], every_seconds: float, *, once: bool) -> Seen:
        """Look until the run is over; return the last look. Raises StorageFailed.

        A server that starts again is waited for.
        """
        silent_since: float | None = None
        while True:
            try:
                seen = self.look()
                silent_since = None
            except StorageFailed as error:
                silent_since = silent_since or time.monotonic()
                is_gone = time.monotonic() - silent_since > _DOWN_SECONDS
                if error.status or once or is_gone:
                    raise
                self._sleep(every_seconds)
                continue
            show(seen)
            if once or seen.is_over:
                return seen
            self._sleep(every_seconds)

    def look(self) -> Seen:
        """Return what is known now. Raises StorageFailed."""
        page = self._client.ask("GET", self._path)
        ranks = self._client.ask("GET", f"{self._path}/ranks")["ranks"]
        findings = self._client.ask("GET", f"{self._path}/findings")["open"]
        mesh = self._client.ask("GET", f"{self._path}/parallelism")["mesh"]
        numbers: dict[int, dict[str, float | None]] = {rank: {} for rank in mesh["rank"]}
        for column in mesh["values"]:
            if column["key"] in _COLUMNS:
                for rank, value in zip(mesh["rank"], column["values"], strict=True):
                    numbers[rank][column["key"]] = value
        return Seen(page, findings, ranks, numbers)

    def _newest(self) -> str:
        runs = self._client.ask("GET", "/runs?limit=50")["runs"]
        if not runs:
            raise StorageFailed("the server has no run yet; start one: rankscope run --help", 404)
        live = [run for run in runs if run["status"] not in _OVER]
        return str((live or runs)[0]["run_id"])


def _screen_of(arguments: argparse.Namespace, url: str) -> _Screen | _Json:
    if arguments.json:
        return _Json()
    console = SafeConsole(highlight=False)
    return _Screen(console, url, is_live=console.is_terminal and not arguments.once)


class _Json:
    """Prints each look as one line."""

    def __enter__(self) -> _Json:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def show(self, seen: Seen) -> None:
        """Print what is known now."""
        ranks = [row | seen.numbers.get(row["rank"], {}) for row in seen.worst_first()]
        looked = {**seen.page, "findings": seen.findings, "ranks": ranks}
        print(json.dumps(looked), flush=True)


class _Screen:
    """Draws each look over the one before; the last one alone where no one watches."""

    def __init__(self, console: SafeConsole, url: str, *, is_live: bool) -> None:
        self._console, self._url = console, url.rstrip("/")
        self._live = Live(console=console, auto_refresh=False) if is_live else None
        self._last: RenderableType | None = None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._last is not None:
            self._console.print(self._last)

    def show(self, seen: Seen) -> None:
        """Draw what is known now."""
        rows = max(self._console.height - _LINES_AROUND, 3) if self._live is not None else _ROWS
        self._last = Group(*self._parts(seen, rows))
        if self._live is not None:
            self._live.start()
            self._live.update(self._last, refresh=True)

    def _parts(self, seen: Seen, most_rows: int) -> list[RenderableType]:
        run, answer = seen.page["run"], seen.page["answer"]
        verdict = seen.page["verdict"]
        state = "" if verdict is None else _STYLES.get(verdict["severity"], "")
        shares = [f"{row['label'].lower()} {_number(row)}" for row in seen.page["numbers"]]
        parts: list[RenderableType] = [
            Text.assemble(
                (one_line(run["name"]), "bold"), f"  {run['status']}, step {run['step']:,}  ",
                (f"{self._url}/runs/{quote(run['run_id'], safe='')}", "dim"),
            ),
            Text(one_line(answer["text"]), style=state or "bold"),
        ]  # fmt: skip
        if answer["detail"]:
            parts.append(Text(one_line(answer["detail"]), style="dim"))
        if verdict is not None and verdict["next"]:
            parts.append(Text.assemble(("Next: ", "bold"), one_line(verdict["next"])))
        parts.append(Text("; ".join([*shares, seen.page["coverage"]["text"]]), style="dim"))
        others = [one for one in seen.findings if verdict is None or one["id"] != verdict["id"]]
        parts += [
            Text.assemble((f"{one['severity']:<9}", _STYLES.get(one["severity"], "")),
                          one_line(one["what"]))
            for one in others[:_MOST_FINDINGS]
        ]  # fmt: skip
        return [*parts, Text(), _ranks_table(seen, most_rows)]


def _ranks_table(seen: Seen, most_rows: int) -> Table:
    """Return the ranks, worst first; of many only those."""
    rows = seen.worst_first()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "host", "state", "step", "phase", *_COLUMNS.values()):
        is_number = name in ("rank", "step", *_COLUMNS.values())
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows[:most_rows]:
        numbers = seen.numbers.get(row["rank"], {})
        is_slow = (numbers.get("own_ratio") or 0.0) >= _BAD_RATIO
        is_bad = row["state"] in _STATES or is_slow
        table.add_row(
            str(row["rank"]), one_line(row["host"]), row["state"], f"{row['step']:,}",
            one_line(row["phase"] or ""),
            *(_cell(name, numbers.get(name)) for name in _COLUMNS),
            style="yellow" if is_bad else "",
        )  # fmt: skip
    if len(rows) > most_rows:
        table.caption = f"and {len(rows) - most_rows:,} more ranks"
        table.caption_justify = "left"
    return table


def _cell(name: str, value: float | None) -> str:
    """Return a value; what is not known is no zero."""
    if value is None:
        return "\u2013"
    forms: dict[str, Callable[[float], str]] = {
        "own_ratio": lambda number: f"{number:.2f}\u00d7",
        "own_ms": lambda number: f"{number:,.1f} ms",
        "waiting_ratio": lambda number: f"{100 * number:.1f} %",
        "rank_memory": lambda number: size(int(number)),
    }
    return forms[name](value)


def _number(row: dict[str, Any]) -> str:
    """Return one of the key numbers with its unit."""
    if row["value"] is None:
        return "not known"
    if row["unit"] == "ratio":
        return f"{100 * row['value']:.1f} %"
    return f"{row['value']:.4g} {row['unit']}".rstrip()


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.2 <= number <= 3_600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.2 to 3,600")
    return number


def _refuse(text: str, exit_code: int) -> int:
    sys.stderr.write(f"rankscope watch: {shown(text)}\n")
    return exit_code
