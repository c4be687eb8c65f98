"""Loss and gradient norm of the whole job: spikes that pass, and divergence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median
from rankscope_server.observe.number_table import NumberTable

_MAX_FINDINGS = 8
_LAGS = (1, 8)


@dataclass(frozen=True, slots=True)
class Spike:
    """Values of one number that are far above those before, `first` to `last` step."""

    name: str
    first: int
    last: int
    peak: float
    centre: float
    sigma: float  # of the values, or of their logarithms
    num_values: int
    is_over: bool


class Spikes:
    """Finds spikes of loss and gradient norm, and losses that do not come back from one."""

    name: ClassVar[str] = "spikes"
    finds: ClassVar[str] = "Spikes of loss and gradient norm, losses that do not come back"
    needs: ClassVar[str] = "51 recorded values"
    silent: ClassVar[str] = "a spike that passes is info"

    def look(self, window: Window) -> DetectorResult:
        """Return the spikes of an attempt; those that passed are info."""
        numbers, policy = window.facts.numbers, window.policy
        num_values = max(len(numbers.steps(name)) for name in ("loss", "gradient_norm"))
        if not num_values:
            return skipped(
                self,
                "no loss or gradient norm was recorded",
                "train with backward() or call rankscope.log_metrics(step, loss=...)",
            )
        if num_values <= policy.spike_min_history:
            need = policy.spike_min_history + 1
            return skipped(self, f"needs {need} recorded values, has {num_values}", "wait")
        loss = spikes_of(numbers, "loss", policy)
        norm = spikes_of(numbers, "gradient_norm", policy)
        found = [_finding(window, spike, _same(spike, norm)) for spike in loss]
        found += [_finding(window, spike, None) for spike in norm if _same(spike, loss) is None]
        found.sort(key=lambda finding: (finding.severity != "critical", -(finding.onset_step or 0)))
        found = _with_memory(window, found[:_MAX_FINDINGS])
        checked = () if found else (f"loss and gradient norm: no spike in {num_values} values",)
        return ran(self, found, checked)


def spikes_of(numbers: NumberTable, name: str, policy: Policy) -> list[Spike]:
    """Return the spikes of a number's median over ranks."""
    steps, values, counts = numbers.typical(name)
    if not len(steps):
        return []
    known = 2 * counts >= counts.max()  # too few ranks make a median jump
    steps, values = steps[known], values[known]
    if name == "loss":
        return find_spikes(name, steps, values, policy)
    positive = values > 0
    return find_spikes(name, steps[positive], np.log(values[positive]), policy)


def find_spikes(name: str, steps: Array, values: Array, policy: Policy) -> list[Spike]:
    """Return the stretches in which values are far above the history before them.

    The history of a stretch is frozen at its first value; it ends when as many values as it took
    to begin are below half the level.
    """
    is_loss = name == "loss"
    limit = policy.spike_loss_z if is_loss else policy.spike_norm_z
    needed = policy.spike_loss_values if is_loss else 1
    centre, sigma = history(values, policy, is_loss=is_loss)
    with np.errstate(invalid="ignore"):
        high = values > centre + limit * sigma
    spikes: list[Spike] = []
    at = 0
    while at < len(values):
        if not high[at : at + needed].all() or at + needed > len(values):
            at += 1
            continue
        level = centre[at] + 0.5 * limit * sigma[at]
        calm = values[at:] <= level
        quiet = np.flatnonzero(np.convolve(calm, np.ones(policy.spike_loss_values))[: len(calm)]
                               >= policy.spike_loss_values)  # fmt: skip
        is_over = bool(len(quiet))
        stop = at + int(quiet[0]) - policy.spike_loss_values + 1 if is_over else len(values)
        stop = max(stop, at + 1)
        spikes.append(
            Spike(name, int(steps[at]), int(steps[stop - 1]), float(values[at:stop].max()),
                  float(centre[at]), float(sigma[at]), stop - at, is_over)
        )  # fmt: skip
        at = stop + policy.spike_loss_values
    return spikes


def history(values: Array, policy: Policy, *, is_loss: bool) -> tuple[Array, Array]:
    """Return median and sigma of the values before each; NaN where they are too few.

    The median is of the newest of them and sigma comes from differences, because a loss falls:
    its fall would widen a MAD until no spike stands out. Two lags, so that noise which hangs
    together counts too.
    """
    size = policy.spike_window
    if not len(values):
        return values, values
    padded = np.concatenate([np.full(size, np.nan), values])[:-1]
    before = sliding_window_view(padded, size)
    centre = median(before[:, -policy.spike_min_history :])
    sigma = np.fmax(*(
        median(np.abs(before[:, lag:] - before[:, :-lag])) * (SIGMA_PER_MAD / np.sqrt(2.0))
        for lag in _LAGS
    ))  # fmt: skip
    floor = policy.loss_sigma_floor * np.abs(centre) if is_loss else policy.ln_norm_sigma_floor
    sigma = np.maximum(sigma, floor)
    few = np.sum(~np.isnan(before), axis=1) < policy.spike_min_history
    return np.where(few, np.nan, centre), np.where(few, np.nan, sigma)


def _same(spike: Spike, others: list[Spike]) -> Spike | None:
    """Return the spike of another number at the same time."""
    slack = max(spike.last - spike.first, 32)
    return next((o for o in others if abs(o.first - spike.first) <= slack), None)


def _shown(name: str, value: float) -> str:
    return f"{value:.4g}" if name == "loss" else f"{np.exp(value):.4g}"


def _finding(window: Window, spike: Spike, other: Spike | None) -> Finding:
    lasting = spike.name == "loss" and spike.num_values >= window.policy.divergence_values
    lasting &= not spike.is_over
    word = "loss" if spike.name == "loss" else "gradient norm"
    peak, centre = _shown(spike.name, spike.peak), _shown(spike.name, spike.centre)
    z = (spike.peak - spike.centre) / spike.sigma
    alternates = lasting and window.facts.numbers.alternates
    what = (
        f"The mean loss of networks that train in turn rises since step {spike.first:,}"
        if alternates
        else f"The loss diverges since step {spike.first:,}" if lasting
        else f"A transient spike of the {word} at step {spike.first:,}, over by itself"
        if spike.is_over
        else f"A spike of the {word} since step {spike.first:,}; whether it passes is not known yet"
    )  # fmt: skip
    why = (
        f"It reaches {peak}, {z:.0f} sigma above the median of {centre} before it, over "
        f"{spike.num_values} recorded values"
    )
    if other is not None:
        name = "gradient norm" if other.name != "loss" else "loss"
        why += f"; the {name} rises with it, to {_shown(other.name, other.peak)}"
    confidence = 0.9 if lasting and other is not None else 0.8 if lasting else 0.7
    return window.finding(
        "divergence" if lasting else "loss_spike",
        spike.first,
        severity="critical" if lasting and not alternates else "info",
        is_over=spike.is_over,
        onset_step=spike.first,
        ended_step=spike.last if spike.is_over else None,
        what=what,
        why=why,
        next="Nothing, if they train against each other: what one gains the other loses. Look at "
        "the loss of each"
        if alternates
        else f"Go on from a checkpoint saved before step {spike.first:,} with a lower learning "
        "rate or without the batches of these steps"
        if lasting
        else "Nothing, if it stays rare; look at the batches of these steps if it returns",
        confidence=(
            confidence,
            "loss and gradient norm agree"
            if confidence >= 0.85
            else f"one number, {spike.num_values} values of it",
        ),
        evidence=(f"Step {spike.first:,} to {spike.last:,}: up to {peak}, before {centre}",),
        disproof="The data or the loss function changed there on purpose",
    )


def _with_memory(window: Window, findings: list[Finding]) -> list[Finding]:
    """Keep a divergence whose onset has left the table: its history is diverged values now."""
    steps = window.facts.numbers.steps("loss")
    horizon = steps[min(len(steps) - 1, window.policy.spike_min_history)] if steps else 0
    now = {finding.key for finding in findings}
    kept = [
        replace(old)
        for key, old in window.before.items()
        if old.detector == "spikes" and old.kind == "divergence" and old.state == "open"
        and key not in now and (old.onset_step or 0) <= horizon
    ]  # fmt: skip
    return [*kept, *findings]
