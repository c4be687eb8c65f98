"""The table of faults is complete in both directions: modules, table, README and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rankscope_trainer.__main__ import fault_table
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.faults.fault import Fault

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "reference_trainer/rankscope_trainer/faults"
README = (REPOSITORY / "reference_trainer/README.md").read_text()
TESTS = sorted(Path(__file__).parent.glob("test_fault*.py"))


def _faults_of_module(path: Path) -> list[str]:
    """Return the names of the faults whose classes a module defines, without importing it."""
    return [
        line.value.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name"
        if isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
    ]


def test_every_fault_of_a_module_is_in_the_table_and_the_other_way_round() -> None:
    defined = [name for path in sorted(FOLDER.glob("*.py")) for name in _faults_of_module(path)]
    assert sorted(defined) == sorted(fault.name for fault in FAULTS)


def test_the_command_lists_exactly_the_faults() -> None:
    lines = fault_table().splitlines()
    assert lines[0].split()[:3] == ["fault", "finding", "size"]
    assert [line.split()[:2] for line in lines[1:]] == [[f.name, f.finding] for f in FAULTS]


def test_the_readme_lists_exactly_the_faults_with_their_findings() -> None:
    section = README.partition("## Faults")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted((fault.name, fault.finding) for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_test_of_a_run_shows_that_the_fault_fires(fault: Fault) -> None:
    """Each such test writes the fault as a user does, or names it to read the manifest."""
    shown = [
        path.name
        for path in TESTS
        if path != Path(__file__) and re.search(rf'\b{fault.name}[:"]', path.read_text())
    ]
    assert shown, f"no test gives --fault {fault.name}"
