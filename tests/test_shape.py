"""A reading aid: every module says what it is, and each function fits on a screen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent/rankscope", "server/rankscope_server", "reference_trainer/rankscope_trainer")
MAX_FUNCTION_LINES = 60
FILES = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "generated" not in path.name
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shape(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno
            assert lines < MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_no_test_imports_from_another_one() -> None:
    """What two of them need is in a module of its own; also in programs that tests write."""
    imports = re.compile(r"^[\s\"']*(?:from|import) (?:tests\.|\.)?(?:\w+\.)*test_\w+", re.M)
    found = {
        str(path.relative_to(ROOT)): match.group().strip()
        for path in (ROOT / "tests").rglob("*.py")
        if (match := imports.search(path.read_text()))
    }
    assert not found


def test_no_python_in_web() -> None:
    # a .py file there breaks editable installs
    assert not list((ROOT / "web").rglob("*.py"))
