"""The catalogue of checks and the options, as the command line and the documents show them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check
from rankscope.preflight.verdict.engine import sentence


@dataclass(frozen=True)
class Row:
    """One check as a row of the catalogue."""

    id: str
    family: str
    sentence: str
    scope: str
    needs: str
    tier: str


def rows(foreign: Sequence[Check] = ()) -> Iterator[Row]:
    """Yield the catalogue, in run order."""
    for family, checks in {**FAMILIES, "elsewhere": tuple(foreign)}.items():
        for check in checks:
            needs = ", ".join(sorted(check.needs))
            yield Row(check.id, family, sentence(check), check.scope, needs, check.tier)


def table(foreign: Sequence[Check] = ()) -> Table:
    """Return the catalogue for a terminal."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("check", "scope", "tier"):
        drawn.add_column(heading, no_wrap=True)
    drawn.add_column("what it says")
    before = ""
    for row in rows(foreign):
        if row.family != before:
            drawn.add_row(Text(row.family, style="bold"))
            before = row.family
        said = Text(row.sentence)
        if row.needs:
            said.append(f" Needs {row.needs}.", "dim")
        drawn.add_row(Text(f"  {row.id}"), row.scope, row.tier, said)
    return drawn


def markdown(foreign: Sequence[Check] = ()) -> str:
    """Return the catalogue as the table of docs/preflight.md."""
    lines = [
        "| check | family | what it says | scope | needs | tier |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.id}` | {row.family} | {_cell(row.sentence)} | {row.scope} | {row.needs} | "
        f"{row.tier} |"
        for row in rows(foreign)
    ]
    return "\n".join(lines) + "\n"


def options_markdown(parser: argparse.ArgumentParser) -> str:
    """Return the options of a parser as the table of docs/preflight.md."""
    lines = ["| option | what it does |", "|---|---|"]
    for action in parser._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        value = ""
        if action.nargs != 0:
            shown = action.metavar or "|".join(map(str, action.choices or ()))
            value = f" [{shown}]" if action.nargs == "?" else f" {shown}"
        names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
        help = (action.help or "") % {"default": action.default}
        lines.append(f"| {_cell(names)} | {_cell(help)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
