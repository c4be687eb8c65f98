"""A fleet of real processes, of which one of each kind dies: all is there, once, found as ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("postgres")
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_a_fleet_whose_processes_die_in_turn_loses_nothing_and_stores_nothing_twice() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/fleet.py"), "--rounds", "1", "--json"],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert done.returncode == 0, result
    assert result["hit"] == {
        "worker killed": 1, "gateway stopped": 1, "nats killed": 1, "web stopped": 1,
        "worker stopped": 1,
    }  # fmt: skip
    assert result["passed"]
    assert result["moves"] > 0
    assert result["batches"] > 50
