"""The lessons of docs/mistakes.md and the trainer's README are those of `benchmarks/lessons.py`.

All of them run there, as they are typed on the page; here the quickest do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "benchmarks" / "lessons.py"


def test_every_command_has_its_lesson_and_every_word_is_on_the_page() -> None:
    done = subprocess.run(
        [sys.executable, LESSONS, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "lesson",
    ["The program ends before its first step", "Learning rate and batch (2)", "strategy ring"],
)
def test_a_lesson_runs_as_it_is_written(tmp_path: Path, lesson: str) -> None:
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, LESSONS, "--lessons", lesson, "--out", rows],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert (row["lesson"], row["judgement"]) == (lesson, "right")
