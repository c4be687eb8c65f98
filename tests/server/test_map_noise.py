"""What a map calls usual: the noise of its own run, and no slow rank is taken for noise."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rankscope_server.api.steps.cells import Held, Plane, usual_ratios
from rankscope_server.api.steps.map import _accused
from rankscope_server.api.steps.map_words import map_text
from rankscope_server.store import tables

LEAST = 1.08  # of the dashboard
Array = np.ndarray[Any, np.dtype[Any]]


def cells(sigma: float, lanes: int = 16, columns: int = 400, of: int = 1) -> Array:
    """Return ratios of a healthy run; each cell is the worst `of` so many."""
    noise = np.random.default_rng(7).normal(0.0, sigma, (lanes, columns, of))
    return np.asarray(np.exp(noise).max(axis=2))


def coloured(worst: Array, *, is_of_peers: bool = True) -> Array:
    usual = usual_ratios(worst, is_of_peers=is_of_peers)
    assert usual is not None
    return (worst < min(usual.lo, 1 / LEAST)) | (worst > max(usual.hi, LEAST))


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.1, 0.14])
@pytest.mark.parametrize("of", [1, 64, 512])
def test_a_healthy_run_has_hardly_any_colour(sigma: float, of: int) -> None:
    assert coloured(cells(sigma, of=of)).mean() < 0.01


def test_a_quiet_run_shows_all_that_the_detector_would_name() -> None:
    usual = usual_ratios(cells(0.005), is_of_peers=True)
    assert usual is not None
    assert 0.97 < usual.lo < 1.0 < usual.hi < 1.03


@pytest.mark.parametrize("num_slow", [1, 2, 7])
@pytest.mark.parametrize("since", [0, 100, 390])
def test_slow_ranks_are_no_noise(num_slow: int, since: int) -> None:
    worst = cells(0.03)
    worst[:num_slow, since:] *= 1.5
    marked = coloured(worst)
    assert marked[:num_slow, since:].mean() > 0.95
    assert marked[num_slow:].mean() < 0.01


def test_half_of_the_ranks_slow_is_no_noise() -> None:
    worst = cells(0.03, lanes=4)  # as the medians of the others make it
    worst[:2] *= 1.8
    worst[2:] /= 1.8
    assert coloured(worst).mean() > 0.95


def test_ranks_compared_with_their_past_that_all_become_slow_are_shown() -> None:
    worst = cells(0.03, lanes=2)
    worst *= 1.5
    assert coloured(worst, is_of_peers=False).mean() > 0.95


@pytest.mark.parametrize("sigma", [0.02, 0.1])
@pytest.mark.parametrize("of", [1, 64])
def test_one_far_cell_is_no_noise(sigma: float, of: int) -> None:
    worst = cells(sigma, of=of)
    worst[3, 77] = 2 * worst.max()
    assert coloured(worst)[3, 77]


def test_too_little_is_known_of_noise() -> None:
    few = cells(0.2, columns=5)
    gaps = np.full((3, 50), np.nan)
    for worst in (few, gaps, np.zeros((4, 0)), np.zeros((3, 50))):
        assert usual_ratios(worst, is_of_peers=True) is None


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        (1.0, "No cell is beyond what is usual, -7.4 % to +8.0 %."),
        (1.5, "Rank 3 reaches 1.49 times its reference."),
    ],
)
def test_a_rank_is_named_only_where_one_is_unusual(slow: float, text: str) -> None:
    worst = cells(0.005)
    worst[3, 20] *= slow
    shape, on_device = worst.shape, np.zeros(len(worst), bool)
    plane = Plane(worst, np.ones(shape, int), np.zeros(shape[1], np.int64), {"peers"})
    said = map_text(
        "own_work", plane, on_device, np.zeros(shape, np.uint8), Held(on_device, 1), (0, 0),
        usual_ratios(worst, is_of_peers=True),
    )  # fmt: skip
    assert said.startswith(text)


def test_pinned_are_the_ranks_of_the_verdict_then_those_that_cost_most() -> None:
    engine = sa.create_engine("sqlite://")
    tables.metadata.create_all(engine)
    found = [("cheap", 1, 0.01), ("dear", 2, 0.4), ("verdict", 3, None), ("middle", 4, 0.1)]
    with engine.begin() as connection:
        for key, rank, cost in found:
            body = json.dumps({"ranks": [rank], "cost_throughput_ratio": cost, "what": key})
            connection.execute(
                sa.insert(tables.finding).values(
                    run_id="run", attempt=0, key=key, state="open", opened_ns=1, updated_ns=1,
                    body=body,
                )
            )  # fmt: skip
        run: Any = SimpleNamespace(run_id="run", verdict=json.dumps({"key": "verdict"}))
        assert list(_accused(connection, run)) == [3, 2, 4, 1]
