"""The noise scale on toys whose covariance is known, and when nothing is said."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.numerics.noise_scale import NoiseScale, noise_scale
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from tests.analysis.records import registered
from tests.analysis.simulator import START_NS


def norms(
    gradients: np.ndarray, ranks: int, local: int, steps: int, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return squared norms, steps x ranks and steps, of batches drawn from per-sample gradients."""
    local_squares, reduced_squares = [], []
    for _ in range(steps):
        picked = chance.integers(0, len(gradients), (ranks, local))
        means = gradients[picked].mean(axis=1)
        local_squares.append((means**2).sum(axis=1))
        reduced_squares.append((means.mean(axis=0) ** 2).sum())
    return np.array(local_squares), np.array(reduced_squares)


def quadratic(chance: np.random.Generator) -> np.ndarray:
    """Per-sample gradients of |w - x|^2 / 2 at one w, with x of a known covariance."""
    scales = np.exp(chance.normal(0, 0.7, 50))
    return 1.0 + scales * 3 * chance.normal(size=(4000, 50))


def logistic(chance: np.random.Generator) -> np.ndarray:
    """Per-sample gradients of a logistic regression at a point off its optimum."""
    inputs = chance.normal(size=(4000, 20))
    truth = chance.normal(size=20)
    labels = (inputs @ truth + chance.logistic(size=4000) > 0).astype(float)
    weights = 0.3 * truth + 0.2 * chance.normal(size=20)
    predicted = 1 / (1 + np.exp(-inputs @ weights))
    return (predicted - labels)[:, None] * inputs


def true_scale(gradients: np.ndarray) -> float:
    mean = gradients.mean(axis=0)
    return float(gradients.var(axis=0).sum() / (mean @ mean))


@pytest.mark.parametrize("toy", [quadratic, logistic])
@pytest.mark.parametrize("seed", range(10))
def test_toys_with_known_covariance(toy: object, seed: int) -> None:
    chance = np.random.default_rng(seed)
    gradients = toy(chance)  # type: ignore[operator]
    local, reduced = norms(gradients, ranks=8, local=16, steps=256, chance=chance)
    found = noise_scale(local.mean(axis=1), reduced, 16, 8, POLICY)
    assert found is not None
    assert found.samples == pytest.approx(true_scale(gradients), rel=0.10)
    assert found.low < found.samples < found.high


def test_the_band_covers_the_truth_in_nine_of_ten() -> None:
    covered = 0
    for seed in range(200):
        chance = np.random.default_rng(seed)
        gradients = quadratic(chance)
        local, reduced = norms(gradients, ranks=4, local=8, steps=64, chance=chance)
        found = noise_scale(local.mean(axis=1), reduced, 8, 4, POLICY)
        assert found is not None
        covered += found.low <= true_scale(gradients) <= found.high
    assert covered >= 0.84 * 200


def test_it_agrees_with_the_formula_of_one_sample() -> None:
    """McCandlish et al. 2018 (arXiv 1812.06162), A.1: trace of the covariance over |G|^2."""
    local, reduced, small, big = 9.0, 2.25, 16, 16 * 8  # squares of norms, and samples
    square = (big * reduced - small * local) / (big - small)
    variance = (local - reduced) / (1 / small - 1 / big)
    many = noise_scale(np.full(32, local), np.full(32, reduced), small, 8, POLICY)
    assert many is not None
    assert many.samples == pytest.approx(variance / square)


def test_the_example_of_the_specification() -> None:
    found = NoiseScale(4600, 3700, 5800, 1024, 200)
    assert found.steps_ratio(2.0) == pytest.approx(0.6, abs=0.02)
    assert 13 * found.batch > 2.8 * found.samples  # beyond 13 times, samples are wasted


def job(batch: int, noise: float, ranks: int = 4, steps: int = 1000, nan: bool = False) -> RunState:
    chance = np.random.default_rng(1)
    state = RunState("run")
    gradients = 1.0 + noise * chance.normal(size=(4000, 30))
    for rank in range(ranks):
        state.apply_record(registered(rank, ranks, host="a"))
        columns = {name: np.zeros(steps, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, steps + 1)
        columns["duration_ns"] = np.full(steps, 10**8)
        state.apply_chunk(
            schema.Chunk(kind="steps", attempt=0, rank=rank, host="", count=steps, time_lo_ns=1,
                         time_hi_ns=2, data=str(rank).encode()),
            dict(columns),
        )  # fmt: skip
    sampled = range(16, steps, 16)
    local, reduced = norms(gradients, ranks, batch // ranks, len(sampled), chance)
    for at, step in enumerate(sampled):
        for rank in range(ranks):
            values = {
                "gradient_norm_local": float(np.sqrt(local[at, rank])),
                "gradient_norm": float(np.sqrt(reduced[at])), "samples": batch / ranks,
                "gradient_nonfinite": float(nan),
            }  # fmt: skip
            state.apply_record(schema.Metrics(
                attempt=0, rank=rank, time_ns=START_NS + step, step=step, values=values,
            ))  # fmt: skip
    return state


def found_in(state: RunState) -> tuple[str, list[Finding]]:
    look = state.look(START_NS + 10**12)
    status = next(detector for detector in look.detectors if detector.name == "noise-scale")
    return status.state, [finding for finding in look.findings if finding.detector == "noise-scale"]


@pytest.mark.parametrize(
    ("noise", "words"),
    [(20.0, "more ranks would save steps"), (8.0, "as large as the noise"), (3.0, "save no steps")],
)
def test_zones(noise: float, words: str) -> None:
    state, (finding,) = found_in(job(64, noise))
    assert state == "ran"
    assert words in finding.what
    assert (finding.severity, finding.ranks) == ("info", ())
    assert "(" in finding.why  # advice is a range


def test_silence() -> None:
    assert found_in(job(64, 8.0, steps=190)) == ("skipped", [])
    assert found_in(job(64, 8.0, nan=True)) == ("skipped", [])
    assert found_in(job(64, 8.0, ranks=1)) == ("skipped", [])
