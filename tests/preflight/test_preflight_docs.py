"""The document says what the code says. RANKSCOPE_GOLDEN=write writes its tables anew."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from rankscope.cli.preflight import PreflightCommand
from rankscope.preflight import launch_gate as gate
from rankscope.preflight.checks import CHECKS
from rankscope.preflight.options import Options
from rankscope.preflight.report import catalogue
from rankscope.preflight.verdict.engine import sentence

DOCUMENT = Path(__file__).parents[2] / "docs" / "preflight.md"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rankscope preflight")
    PreflightCommand().add_arguments(made)
    return made


def tables() -> dict[str, str]:
    return {
        "options": catalogue.options_markdown(parser()),
        "catalogue": catalogue.markdown(),
    }


@pytest.mark.parametrize("name", ["options", "catalogue"])
def test_the_tables_are_the_code(name: str) -> None:
    text, table = DOCUMENT.read_text(), tables()[name]
    section = re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- end -->)", re.S)
    if os.environ.get("RANKSCOPE_GOLDEN") == "write":
        DOCUMENT.write_text(section.sub(lambda found: found[1] + table + found[3], text))
        text = DOCUMENT.read_text()
    found = section.search(text)
    assert found is not None
    assert found[2] == table


def test_every_check_says_what_it_is() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        text = sentence(check)
        assert text.endswith("."), check.id
        assert len(text) < 90, check.id
        assert re.fullmatch(r"[a-z]+(\.[a-z0-9_]+)+", check.id)


def test_every_option_has_a_help_that_the_document_shows() -> None:
    text = DOCUMENT.read_text()
    for action in parser()._actions:
        assert action.help, action.dest
        for name in action.option_strings:
            assert action.help == argparse.SUPPRESS or f"`{name}" in text


def test_every_field_of_the_options_can_be_asked_for() -> None:
    given = set(vars(parser().parse_args([])))
    names = {"num_loader_workers": "loader_workers", "checkpoint_gb": "ckpt_gb"}
    for field in Options.__struct_fields__:
        assert names.get(field, field) in given


def test_exit_codes_of_the_document_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    assert [int(code) for code, _ in rows] == [0, 1, 2, 3, 64, gate.EXIT_REFUSED]
