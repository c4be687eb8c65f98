"""The table of docs/plan.md is what recorded runs and today's planner say, and within bounds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEDIAN, WORST = 10.0, 25.0  # percent


@pytest.fixture(scope="module")
def printed() -> str:
    done = subprocess.run(
        [sys.executable, "benchmarks/plan.py", "--table", "--label", "any"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_document_has_the_table(printed: str) -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    made = re.search(r"made by benchmarks/plan.py -->\n(.*)<!-- end", text, re.S)
    assert made is not None
    assert made[1].strip() == printed.strip()


@pytest.mark.parametrize("kind", ["Memory", "Time"])
def test_what_is_planned_is_near(printed: str, kind: str) -> None:
    found = re.search(rf"{kind}, (\d+) runs: median error ([\d.]+)%, worst ([\d.]+)%", printed)
    assert found is not None
    assert int(found[1]) >= 40
    assert float(found[2]) <= MEDIAN
    assert float(found[3]) <= WORST
