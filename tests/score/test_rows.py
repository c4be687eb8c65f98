"""What the benchmarks of sources and budgets keep, and how they read what ranks recorded."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.files import ring
from rankscope.wire import schema

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from budgets import RankRecord, faulty, num_different_steps
from rows import Rows


def test_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    wanted = [("kernels", 1), ("kernels", 2), ("probe", 1)]
    rows = Rows(tmp_path / "deep" / "rows.jsonl", ("source", "seed"), "abc")
    assert rows.missing(wanted) == wanted
    rows.add(("kernels", 2), {"judgement": "wrong"})
    rows.add(("kernels", 2), {"judgement": "right"})
    again = Rows(rows.path, ("source", "seed"), "abc")
    assert again.missing(wanted) == [("kernels", 1), ("probe", 1)]
    assert [row["judgement"] for row in again.all()] == ["right"]
    assert Rows(rows.path, ("source", "seed"), "of another tree").missing(wanted) == wanted
    assert len([json.loads(line) for line in rows.path.read_text().splitlines()]) == 2


def record(level: int, thinned: list[bool], step_ms: float = 10.0) -> RankRecord:
    """Steps from 1 on of so many ms, with five collectives each."""
    form = np.dtype([(name, kind) for name, kind, _ in ring.STEP_FIELDS])
    steps = np.zeros(len(thinned), form)
    steps["step"] = np.arange(1, len(thinned) + 1)
    steps["num_collectives"] = 5
    steps["flags"] = np.array(thinned) * schema.STEP_THINNED
    steps["started_ns"] = np.arange(len(thinned)) * int(step_ms * 1e6)
    steps["ended_ns"] = steps["started_ns"] + int(step_ms * 1e6)
    return RankRecord(steps, whole_us=30.0, thinned_us=10.0, switch_us=40.0, level=level)


def at_level(level: int, last: int, first: int = 1) -> list[bool]:
    return [step % (1 << max(0, level - 1)) != 0 for step in range(first, last + 1)]


def test_the_cost_is_that_of_the_steps_once_settled() -> None:
    rank = record(3, [False] * 300 + at_level(3, 700, 301), step_ms=100.0)  # from 30 s on
    share = rank.overhead_percent(0.0)
    assert share == pytest.approx(100 * 5 * (30 + 3 * 10) / 4 / 100_000)
    outside = rank.overhead_percent(20.0)
    assert outside == pytest.approx(100 * 5 * (50 + 3 * 30) / 4 / 100_000)
    assert record(3, at_level(3, 310), step_ms=100.0).overhead_percent(0.0) is None  # too few
    assert record(3, []).overhead_percent(0.0) is None
    whole = RankRecord(record(0, [False] * 400, step_ms=100.0).steps, 30.0, math.nan, math.nan, 0)
    assert whole.overhead_percent(0.0) == pytest.approx(100 * 5 * 30 / 100_000)


def test_where_kernels_are_out_only_the_way_out_and_in_costs() -> None:
    rank = record(3, [False] * 300 + at_level(3, 700, 301), step_ms=100.0)
    rank.steps["flags"][rank.thinned] |= schema.STEP_WAITS_UNKNOWN
    cost_us = 5 * (30 + 20) + 2 * 40  # of four steps: one is whole, and two switches
    assert rank.overhead_percent(20.0) == pytest.approx(100 * cost_us / 4 / 100_000, rel=0.01)


def test_steps_that_ranks_recorded_differently_are_counted() -> None:
    one, other = record(2, at_level(2, 100)), record(3, at_level(3, 90))
    assert num_different_steps([one, one]) == 0
    assert num_different_steps([one, other]) == 23  # 2, 6, 10 ... 90
    assert num_different_steps([]) == 0


def row(**other: Any) -> dict[str, Any]:
    return {
        "fault": "slow_compute", "budget_percent": 0.5, "judgement": "right",
        "named_after_seconds": 30.0, "overhead_percent": [0.4, None], "different_steps": 0,
    } | other  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"judgement": "accuses healthy ranks [1]"}, "accuses"),
        ({"judgement": "false alarm: slow_data", "fault": "none"}, "false alarm"),
        ({"judgement": "said nothing"}, "said nothing"),
        ({"judgement": "said nothing", "budget_percent": 0.05, "overhead_percent": []}, ""),
        ({"judgement": "said nothing", "budget_percent": 0.05, "fault": "hang",
          "overhead_percent": []}, "said nothing"),
        ({"named_after_seconds": 61.0}, "named after"),
        ({"named_after_seconds": None}, "named after"),
        ({"overhead_percent": [0.4, 0.6]}, "takes 0.6 %"),
        ({"different_steps": 3}, "3 steps"),
        ({"judgement": "the fault did not fire", "named_after_seconds": None}, ""),
    ],
)  # fmt: skip
def test_what_a_bar_does_not_allow_is_named(changed: dict[str, Any], words: str) -> None:
    found = faulty(row(**changed))
    assert bool(found) == bool(words)
    assert words in "; ".join(found)
