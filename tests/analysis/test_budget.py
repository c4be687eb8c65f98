from __future__ import annotations

import numpy as np
import pytest

from rankscope_server.verdict.budget import PARTS, budget, split

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation")
BLOCKED = ("forward_blocked", "backward_blocked", "optimizer_blocked")


def metrics(seed: int = 0, num_ranks: int = 4, num_steps: int = 30) -> dict[str, np.ndarray]:
    """Random phases in ms; rank 2 computes 50 ms more from column 10 on, the others wait."""
    chance = np.random.default_rng(seed)
    shape = (num_ranks, num_steps)
    found = {name: np.zeros(shape) for name in (*PHASES, *BLOCKED)}
    found["data"] = chance.uniform(0, 1, shape)
    found["forward"] = chance.uniform(20, 25, shape)
    found["forward"][2, 10:] += 50
    found["optimizer"] = chance.uniform(2, 3, shape)
    own = found["data"] + found["forward"] + 40 + found["optimizer"]
    found["backward_blocked"] = own.max(0) - own + 5.0
    found["backward"] = 40 + found["backward_blocked"]
    found["blocked"] = found["backward_blocked"]
    found["step"] = own.max(0) + 5.0 + np.zeros(shape) + 0.2
    return found


def test_parts_add_up_to_the_step() -> None:
    cells = metrics()
    parts = split(cells, ["dp"] * 4)
    total = sum(parts[name] for name in PARTS)
    assert np.allclose(total, cells["step"])
    assert all((parts[name] >= 0).all() for name in PARTS)


def test_the_victims_wait_and_the_culprit_does_not() -> None:
    found = budget(metrics(), [0, 1, 2, 3], ["dp"] * 4, culprits=[2],
                   before=slice(0, 10), now=slice(10, 30))  # fmt: skip
    before, now, culprit = found.rows
    assert [row.label for row in found.rows] == ["median rank before", "median rank now", "rank 2"]
    assert now.parts["waiting"] == pytest.approx(50, abs=4)
    assert culprit.parts["waiting"] == pytest.approx(0, abs=1)
    assert culprit.parts["communication"] == pytest.approx(5, abs=0.5)
    assert now.total_ms - before.total_ms == pytest.approx(50, abs=3)
    for row in found.rows:
        assert sum(row.parts.values()) == pytest.approx(row.total_ms)
    assert "waiting for others" in found.text


def test_a_rank_without_peers_has_no_share_of_communication() -> None:
    parts = split(metrics(), [0, 1, 2, 3])
    assert (parts["communication"] == 0).all()


def test_in_a_pipeline_a_stage_that_waits_for_another_one_waits() -> None:
    """All ranks of the second stage wait for rank 2 of the first: that is no communication."""
    cells = metrics()
    parts = split(cells, ["first", "second", "first", "second"])
    assert np.median(parts["communication"][:, 10:]) == pytest.approx(5, abs=0.5)
    assert np.median(parts["waiting"][[1, 3], 10:]) == pytest.approx(50, abs=4)


def test_missing_steps_and_no_steps() -> None:
    cells = metrics()
    for values in cells.values():
        values[1, 5:9] = np.nan
    assert budget(cells, [0, 1, 2, 3], ["dp"] * 4).rows
    empty = {name: np.zeros((4, 0)) for name in cells}
    assert not budget(empty, [0, 1, 2, 3], ["dp"] * 4).rows
