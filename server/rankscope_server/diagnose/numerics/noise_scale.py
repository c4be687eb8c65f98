"""Gradient noise scale: how far a larger batch, and so more ranks, still saves steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median

_BLOCKS = 16  # of the jackknife
_Z_90 = 1.645


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """B_noise in samples with its 5 to 95 % band, the batch of the job, and on what it rests."""

    samples: float
    low: float
    high: float
    batch: float
    num_values: int

    def steps_ratio(self, factor: float) -> float:
        """Return steps needed at `factor` times the batch over those at the batch.

        The number of steps goes as 1 + B_noise / B (McCandlish et al. 2018, arXiv 1812.06162).
        """
        return (1 + self.samples / (factor * self.batch)) / (1 + self.samples / self.batch)


class StatisticalEfficiency:
    """Estimates how far more ranks would still save steps, from the noise in the gradients."""

    name: ClassVar[str] = "noise-scale"
    finds: ClassVar[str] = "How far more ranks would still save steps"
    needs: ClassVar[str] = "both gradient norms and batch sizes over 200 steps"
    silent: ClassVar[str] = "pipelines; after a NaN"

    def look(self, window: Window) -> DetectorResult:
        """Return what the gradients say of the batch size."""
        numbers, policy = window.facts.numbers, window.policy
        steps = window.steps.num_steps + window.steps.dropped_steps
        if window.world_size < 2:
            return skipped(self, "one rank: local and reduced gradient are the same",
                           "start two or more ranks under DistributedDataParallel")  # fmt: skip
        if any(known.num_stages > 1 for known in window.ranks.values()):
            return skipped(self, "in a pipeline no rank sees the whole gradient", NOT_HERE)
        if not numbers.steps("gradient_norm_local") or not numbers.steps("samples"):
            return skipped(
                self, "no gradient norm before the reduction, or no batch size, was recorded",
                "train under DistributedDataParallel with a DataLoader",
            )  # fmt: skip
        if numbers.flagged:
            return skipped(self, "gradients were NaN or infinite", "see the finding on NaN")
        if steps < policy.noise_min_steps:
            return skipped(self, f"needs {policy.noise_min_steps} steps, has {steps}", "wait")
        found = noise_scale_of(window)
        if found is None:
            return ran(
                self, note="the noise is too large against the gradient to estimate its scale"
            )
        return ran(self, [_finding(window, found)])


def noise_scale_of(window: Window) -> NoiseScale | None:
    """Return the noise scale from the newest samples of both norms; None where it is not known."""
    numbers, policy = window.facts.numbers, window.policy
    reduced_steps = set(numbers.steps("gradient_norm"))
    steps = [s for s in numbers.steps("gradient_norm_local") if s in reduced_steps]
    steps = steps[-policy.noise_window :]
    if len(steps) < _BLOCKS:
        return None
    local = numbers.matrix("gradient_norm_local", steps) ** 2
    reduced = median(numbers.matrix("gradient_norm", steps) ** 2, 0)
    known = ~np.isnan(local)
    ranks = int(np.median(known.sum(axis=0)))
    whole = known.sum(axis=0) == max(ranks, 2)
    if ranks < 2 or whole.sum() < _BLOCKS:
        return None
    samples = numbers.matrix("samples", numbers.steps("samples")[-policy.noise_window :])
    per_rank = float(np.nanmean(samples))
    return noise_scale(np.nanmean(local[:, whole], axis=0), reduced[whole], per_rank, ranks, policy)


def noise_scale(
    local_squares: Array, reduced_squares: Array, local_samples: float, ranks: int, policy: Policy
) -> NoiseScale | None:
    """Return B_noise = S / G2 from means of S and G2 over samples, and its band.

    `local_squares` are squared norms of one rank's gradient, averaged over ranks;
    G2 = (B_big gb - B_small gs) / (B_big - B_small), S = (gs - gb) / (1 / B_small - 1 / B_big)
    (McCandlish et al. 2018, appendix A.1). S and G2 are averaged before the ratio is taken. The
    band is a jackknife over blocks of samples, of the logarithm.
    """
    small, big = local_samples, local_samples * ranks
    squares = (big * reduced_squares - small * local_squares) / (big - small)
    variances = (local_squares - reduced_squares) / (1 / small - 1 / big)
    whole = _ratio(variances, squares)
    blocks = np.array_split(np.arange(len(squares)), _BLOCKS)
    parts = [_ratio(np.delete(variances, block), np.delete(squares, block)) for block in blocks]
    if whole is None or any(part is None for part in parts):
        return None
    logs = np.log([part for part in parts if part is not None])
    error = float(np.sqrt((len(logs) - 1) / len(logs) * np.sum((logs - logs.mean()) ** 2)))
    if error > policy.noise_max_error:
        return None
    spread = float(np.exp(_Z_90 * error))
    return NoiseScale(whole, whole / spread, whole * spread, big, len(squares))


def _ratio(variances: Array, squares: Array) -> float | None:
    variance, square = float(np.mean(variances)), float(np.mean(squares))
    return variance / square if variance > 0 and square > 0 else None


def _round(values: Sequence[float]) -> list[str]:
    """Return numbers with two digits that count."""
    return [f"{float(f'{value:.2g}'):,.0f}" for value in values]


def _finding(window: Window, found: NoiseScale) -> Finding:
    policy = window.policy
    ratio = found.batch / found.samples
    double = found.steps_ratio(2.0)
    fast, slow = (
        max(0.5, double / policy.noise_error_factor),
        min(1.0, double * policy.noise_error_factor),
    )
    scale, low, high, batch = _round([found.samples, found.low, found.high, found.batch])
    if ratio < policy.noise_free_ratio:
        what = "The batch is small for its gradients: more ranks would save steps almost in full"
        advice = (
            "Scale out or raise the batch if time matters; raise the learning rate with it "
            "(SGD in proportion, Adam by its power 0.5 to 1)"
        )
    elif ratio <= policy.noise_waste_ratio:
        what = "The batch is about as large as the noise: more ranks save steps, and cost samples"
        advice = "Keep it, or try twice the batch on a short run before the whole job moves"
    else:
        wasted = found.batch / (found.samples + found.batch)
        what = (
            f"The batch is {ratio:.0f} times the noise scale: {100 * wasted:.0f} % of the samples "
            "save no steps"
        )
        advice = "Fewer ranks, or several jobs side by side, would need fewer GPU-hours"
    efficiency = found.samples / (found.samples + found.batch)
    wide = found.high / found.low
    confidence = 0.7 if wide < 2 else 0.5
    return window.finding(
        "noise_scale",
        what=what,
        why=f"The noise scale is {scale} samples ({low} to {high}), the batch {batch}; twice the "
        f"batch would need about {double:.2f} ({fast:.2f} to {slow:.2f}) of the steps",
        next=advice,
        confidence=(
            confidence,
            "predictions from the noise scale are off "
            "by a factor of two either way, more beyond eight times the batch",
        ),
        evidence=(
            f"{found.num_values} steps with both gradient norms",
            f"Efficiency at this batch: {efficiency:.2f}",
        ),
        disproof="The gradients of the ranks are not of independent samples",
    )
