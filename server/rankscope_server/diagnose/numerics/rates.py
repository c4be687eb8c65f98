"""Learning rates and batches: no warm-up at a large one, a rate that grew in proportion to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.facts import UsedOptimizer

_NEAR = 1e-3  # of a factor


def no_warm_up(window: Window) -> Iterator[Finding]:
    """Yield advice where the first step of a large batch takes the whole learning rate."""
    numbers, policy = window.facts.numbers, window.policy
    first = numbers.head("learning_rate")
    if len(first) < policy.warm_up_values or first[0] > 2:
        return
    steps = sorted({*first, *numbers.steps("learning_rate")})
    rates = over_ranks(numbers.matrix("learning_rate", steps), np.fmax)
    batch = global_batch(window)
    if batch < policy.warm_up_batch or not rates[0] >= (1 - _NEAR) * np.nanmax(rates) > 0:
        return
    yield window.finding(
        "no_warm_up",
        "warm-up",
        onset_step=first[0],
        what=f"No warm-up: the first step of a batch of {batch:,} samples takes the whole learning "
        f"rate, {rates[0]:.3g}",
        why="The first gradients are the largest, and Adam has not seen enough of them to scale "
        "them; a loss that jumps or a run that learns less may follow",
        next="Let the rate rise over the first few hundred steps, as `torch.optim.lr_scheduler."
        "LinearLR` before the schedule does; of Adam scale it by the root of the batch, not by it",
        confidence=(0.5, "advice: what this run loses by it is not known"),
        evidence=(f"The rate of the first {len(first)} recorded steps is never above the first",),
        disproof="A run with warm-up reaches no better loss",
    )  # fmt: skip


def linear_scaling(window: Window) -> Iterator[Finding]:
    """Yield advice where the rate of an optimizer of Adam's kind grew as much as the batch."""
    optimizer, rate = used_optimizer(window), peak_rate(window)
    if optimizer is None or rate is None or not _is_adaptive(optimizer):
        return
    scaled = _scaled_from_command(window, optimizer, rate) or _scaled_between(window, rate)
    if scaled is None:
        return
    name = optimizer.classes[0]
    yield window.finding(
        "linear_scaling",
        "scaling",
        what=f"The learning rate was scaled in proportion to the batch, {scaled.times:.3g} times, "
        f"and {name} is no SGD",
        why=f"{scaled.why}. The step of {name} does not grow with the gradient, and the noise in "
        "it falls by the root of the batch only",
        next=f"Try {scaled.before * math.sqrt(scaled.times):.3g}, by the root of the batch (Malladi"
        " et al. 2022, arXiv 2205.10287); the rule in proportion is that of SGD (Goyal et al. 2017,"
        " arXiv 1706.02677)",
        confidence=(0.5, "advice: what this run loses by it is not known"),
        disproof="A run with the rate by the root reaches no better loss, or this rate was tuned "
        "for this batch",
    )


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A rate that grew as much as the batch did."""

    before: float
    times: float
    why: str


def _scaled_from_command(window: Window, optimizer: UsedOptimizer, rate: float) -> _Scaled | None:
    """Return whether a rate is that of the command line, times ranks or batch over a usual one."""
    given, replicas = optimizer.given_rate, optimizer.replicas or window.world_size
    if not given or rate < window.policy.scaled_times * given:
        return None
    times = rate / given
    why = f"The command gives a rate of {given:.3g}, and the optimizer takes {rate:.3g}: "
    if abs(times / replicas - 1) < _NEAR:
        return _Scaled(given, times, f"{why}as many times as much as there are ranks")
    batch = global_batch(window)
    for usual in window.policy.usual_batches:
        if batch and abs(times * usual / batch - 1) < _NEAR:
            return _Scaled(given, times, f"{why}as many times as much as {usual} samples are in "
                           f"its batch of {batch:,}")  # fmt: skip
    return None


def _scaled_between(window: Window, rate: float) -> _Scaled | None:
    """Return whether the rate grew as the batch did since an earlier attempt."""
    batch, optimizer = global_batch(window), used_optimizer(window)
    for past in reversed(window.past):
        then, before, known = global_batch(past), peak_rate(past), used_optimizer(past)
        if not (batch and then and before and known and optimizer):
            continue
        times = batch / then
        if times < window.policy.scaled_times or known.classes != optimizer.classes:
            continue
        if abs(rate / before / times - 1) < _NEAR:
            return _Scaled(before, times, f"{before:.3g} for {then:,} samples of a step in attempt "
                           f"{past.attempt}, {rate:.3g} for {batch:,} now")  # fmt: skip
    return None


def _is_adaptive(optimizer: UsedOptimizer) -> bool:
    return any("adam" in name.lower() for name in optimizer.classes)


def used_optimizer(window: Window) -> UsedOptimizer | None:
    """Return what optimizer all ranks have, None where it is not known or they differ."""
    known = window.facts.optimizers.values()
    if len({(one.classes, one.given_rate, one.replicas) for one in known}) != 1:
        return None
    return max(known)


def peak_rate(window: Window) -> float | None:
    """Return the largest learning rate, None as long as it may rise further."""
    numbers = window.facts.numbers
    steps = sorted({*numbers.head("learning_rate"), *numbers.steps("learning_rate")})
    rates = over_ranks(numbers.matrix("learning_rate", steps), np.fmax)
    rates = rates[~np.isnan(rates)]
    if len(rates) < window.policy.warm_up_values:
        return None
    most = float(rates.max())
    is_level = np.ptp(rates[-window.policy.warm_up_values :]) == 0
    return most if rates[0] == most or rates[-1] < most or is_level else None


def global_batch(window: Window) -> int:
    """Return the samples of a step over all replicas, 0 where it is not known."""
    sizes = {one.replicas for one in window.facts.optimizers.values() if one.replicas} or {
        one.group_size
        for numbers in window.facts.passes.by_loader.values()
        for ranks in numbers.values()
        for one in ranks.values()
    }
    numbers = window.facts.numbers
    steps = numbers.steps("samples")
    if len(sizes) != 1 or not steps:
        return 0
    return int(sizes.pop() * np.nanmedian(numbers.matrix("samples", steps[-64:])))


def over_ranks(values: Array, reduce: np.ufunc) -> Array:
    """Return what a ufunc makes of the values of all ranks, by step; NaN where none is known."""
    found: Array = reduce.reduce(values, axis=0, initial=np.nan)
    return found
