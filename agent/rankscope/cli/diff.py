"""`rankscope diff`: what changed from one run to another, as the page Compare says it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

from rich.table import Table

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.cli.storage import StorageClient, StorageFailed, client_of
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, shown

EXIT_UNREACHABLE = 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_SIDE = re.compile(r"^(?P<run>.+?)(?:@(?P<attempt>\d+))?(?::(?P<lo>\d+)-(?P<hi>\d+))?$")
_MOST_FACTS = 20


@dataclass(frozen=True)
class Side:
    """A run, and which part of it; None: its newest attempt, its usual steps."""

    run: str
    attempt: int | None
    lo: int | None
    hi: int | None


class DiffCommand:
    """Show what changed from one run to another: in one sentence, then part by part.

    A and B are ids of runs on a server, with the attempt and the steps if not all are meant:
    RUN@ATTEMPT:FROM-TO. With one run alone it is compared with the run before of its name.
    A difference that is within the noise of the two runs is not called one.

    Examples:
      rankscope diff monday tuesday
      rankscope diff tuesday                         the run before of the same name
      rankscope diff my-run:1-500 my-run:501-900     steps of one run
      rankscope diff my-run@0 my-run@1 --json        two attempts, as the server answers

    Exit codes: 0 compared, whatever came out; 2 the server cannot be reached or does not know a
    run; 64 wrong usage. A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "diff"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("first", metavar="A", help="id of the earlier run, with its steps")
        parser.add_argument("second", nargs="?", metavar="B", help="id of the later run")
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Ask the server and print the answer."""
        first = side_of(arguments.first)
        second = side_of(arguments.second) if arguments.second else None
        before, after = (None, first) if second is None else (first, second)
        try:
            settings = from_environment(os.environ)
            client = client_of(
                arguments.server or settings.server or DEFAULT_SERVER, settings.token
            )
        except (SettingError, AddressError) as error:
            sys.stderr.write(f"rankscope diff: {shown(str(error))}\n")
            return EXIT_USAGE
        with contextlib.closing(client):
            try:
                answer = StorageClient(client).ask("GET", path_of(before, after))
            except StorageFailed as error:
                sys.stderr.write(f"rankscope diff: {shown(str(error))}\n")
                return EXIT_UNREACHABLE
        if arguments.json:
            print(json.dumps(answer))
        else:
            _Screen(SafeConsole(highlight=False)).show(answer)
        return 0


def side_of(text: str) -> Side:
    """Return what RUN@ATTEMPT:FROM-TO names."""
    found = _SIDE.match(text)
    if found is None:
        return Side(text, None, None, None)
    attempt, lo, hi = (None if part is None else int(part) for part in found.groups()[1:])
    return Side(found["run"], attempt, lo, hi)


def path_of(before: Side | None, after: Side) -> str:
    """Return the address of the comparison."""
    asked: dict[str, Any] = {"attempt": after.attempt, "from": after.lo, "to": after.hi}
    if before is not None:
        asked |= {
            "before": before.run, "before_attempt": before.attempt, "before_from": before.lo,
            "before_to": before.hi,
        }  # fmt: skip
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    return f"/runs/{quote(after.run, safe='')}/compare" + (f"?{query}" if query else "")


class _Screen:
    """Prints a comparison."""

    def __init__(self, console: SafeConsole) -> None:
        self._console = console

    def show(self, answer: dict[str, Any]) -> None:
        """Print the sentence, then the evidence."""
        self._say(answer["text"])
        if answer["before"] is None:
            return
        before, after = answer["before"]["label"], answer["after"]["label"]
        for text in answer["not_comparable"]:
            self._say(f"Note: {text}")
        for part in answer["left_out"]:
            count = "" if part["count"] is None else f"{part['count']:,} "
            self._say(f"Not counted: {count}{part['what']}")
        self._parts(answer, before, after)
        self._rates(answer, before, after)
        self._facts(answer)
        self._findings(answer)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _parts(self, answer: dict[str, Any], before: str, after: str) -> None:
        if answer["step"] is None:
            return
        table = _table("part", f"{before} ms", "p95", f"{after} ms", "p95", "change ms", "")
        for row in (answer["step"], *answer["parts"]):
            numbers = (
                row[f"{side}_{kind}_ms"]
                for side in ("before", "after")
                for kind in ("median", "p95")
            )
            table.add_row(
                row["label"], *map(_ms, numbers), _ms(row["difference_ms"], is_signed=True),
                state_text(row),
            )  # fmt: skip
        self._console.print()
        self._console.print(table)
        self._say(answer["noise_text"])

    def _rates(self, answer: dict[str, Any], before: str, after: str) -> None:
        table = _table("work", before, after, "ratio")
        for row in answer["rates"]:
            unit = f", {row['unit']}" if row["unit"] else ""
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3g}"
            table.add_row(row["label"] + unit, _ms(row["before"]), _ms(row["after"]), ratio)
        if answer["rates"]:
            self._console.print()
            self._console.print(table)

    def _facts(self, answer: dict[str, Any]) -> None:
        facts = answer["facts"]
        total = (answer["facts_capped"] or {"total": len(facts)})["total"]
        self._console.print()
        self._say(
            f"What differs around them: {total:,}; facts alike: {answer['num_common_facts']:,}"
        )
        for fact in facts[:_MOST_FACTS]:
            self._say(f"  {fact['severity']:8} {fact['text']}")
        if total > _MOST_FACTS:
            self._say(f"  the first {_MOST_FACTS} of {total:,}; --json has more")

    def _findings(self, answer: dict[str, Any]) -> None:
        for row in answer["findings"]:
            sides = {
                (True, True): "both", (True, False): "before only", (False, True): "after only",
            }  # fmt: skip
            which = sides[row["before_id"] is not None, row["after_id"] is not None]
            self._say(f"Finding, {which}: {row['what']}")


def state_text(row: dict[str, Any]) -> str:
    """Return whether a difference counts."""
    if row["before_median_ms"] is None or row["after_median_ms"] is None:
        return "not known of both"
    if row["state"] == "unknown":
        return "not known: too few steps"
    span = f" ({_ms(row['low_ms'], is_signed=True)} to {_ms(row['high_ms'], is_signed=True)})"
    words = "no difference beyond noise" if row["state"] == "same" else row["state"]
    return f"{words}{span}"


def _ms(value: float | None, *, is_signed: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"+{text}" if is_signed and value > 0 else text


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        is_text = place == 0 or not heading
        table.add_column(heading, overflow="fold", justify="left" if is_text else "right")
    return table
