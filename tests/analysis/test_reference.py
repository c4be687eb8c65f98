from __future__ import annotations

import numpy as np
import pytest

from rankscope_server.verdict.reference import ratios


def test_four_of_a_role_are_compared_with_the_others() -> None:
    work = np.full((4, 10), 100.0)
    work[2, 5:] = 190.0
    found = ratios(work, ["dp"] * 4)
    assert found.kinds == ("peers",) * 4
    assert found.ratio[2, 5:] == pytest.approx(1.9)
    assert found.ratio[[0, 1, 3]] == pytest.approx(1.0)


def test_stages_are_compared_with_their_own_past() -> None:
    work = np.array([[100.0] * 40, [50.0] * 40])
    work[1, 30:] = 100.0
    found = ratios(work, ["stage 0", "stage 1"])
    assert found.kind == "own"
    assert found.ratio[0] == pytest.approx(1.0)
    assert found.ratio[1, 30:] == pytest.approx(2.0)


def test_the_own_reference_may_come_from_elsewhere() -> None:
    found = ratios(np.full((2, 5), 80.0), ["a", "b"], early=np.full((2, 40), 40.0))
    assert found.ratio == pytest.approx(2.0)


def test_missing_is_missing() -> None:
    work = np.full((4, 3), 100.0)
    work[0, 1] = np.nan
    work[:3, 2] = np.nan
    found = ratios(work, ["dp"] * 4)
    assert np.isnan(found.ratio[0, 1])
    assert found.ratio[1:, 1] == pytest.approx(1.0)
    assert np.isnan(found.ratio[:, 2]).all()  # one rank alone is no comparison
    assert ratios(np.zeros((0, 0)), []).kind is None
    assert ratios(np.zeros((4, 0)), ["dp"] * 4).ratio.shape == (4, 0)


def test_cells_must_fit_the_roles() -> None:
    with pytest.raises(ValueError, match="roles"):
        ratios(np.zeros((3, 2)), ["a"])
