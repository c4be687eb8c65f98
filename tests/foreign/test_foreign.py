"""A sample of `benchmarks/foreign.py`: a script with BatchNorm, faults that it knows nothing of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.quiet
@pytest.mark.multiproc
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["sleep", "stopped"])
def test_the_slow_rank_of_a_foreign_program_is_named(tmp_path: Path, fault: str) -> None:
    results = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "foreign.py", "--programs", "batchnorm",
         "--sources", "kernels", "--faults", fault, "--seeds", "1", "--out", results],
        env=os.environ | {"FOREIGN_AFTER_S": "12"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = map(json.loads, results.read_text().splitlines())
    assert row["judgement"] == "right"
    assert row["named_after_seconds"] is not None
