"""A reading aid: every module says what it is, and each function fits on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent/rankscope", "server/rankscope_server", "reference_trainer/rankscope_trainer")
MAX_FUNCTION_LINES = 60
MAX_STRATEGY_LINES = 250  # each is read from top to bottom by somebody who is new to it
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


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent.name == "strategies"], ids=lambda path: path.stem
)
def test_a_strategy_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_STRATEGY_LINES


def test_no_python_in_web() -> None:
    # a .py file there breaks editable installs
    assert not list((ROOT / "web").rglob("*.py"))
