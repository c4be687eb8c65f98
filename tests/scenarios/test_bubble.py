"""The idle time of a real pipeline is the one that its schedule leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/bubble.py"
# Measured on an idle machine: +0.7 to +1.9 points over all of p = 2, 4 and m = 2 to 16.
TOLERANCE = 0.05


def _measured(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARK), "--json", "--stage-seconds", "0.1", "--steps", "3"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


pytestmark = [pytest.mark.multiproc, pytest.mark.quiet]


@pytest.mark.parametrize("number", ["2", "4"])
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_formula(number: str) -> None:
    rows = _measured("--ranks", number, "--microbatches", number)
    assert [row["schedule"] for row in rows] == ["gpipe", "1f1b"]
    for row in rows:
        ranks, microbatches = row["ranks"], row["microbatches"]
        formula = (ranks - 1) / (microbatches + ranks - 1)
        assert row["idle_ratio"]["median"] == pytest.approx(formula, abs=TOLERANCE), row


def test_without_a_pipeline_all_ranks_but_one_idle() -> None:
    (row,) = _measured("--ranks", "2", "--schedules", "model_parallel")
    assert row["idle_ratio"]["median"] == pytest.approx(1 / 2, abs=TOLERANCE), row
