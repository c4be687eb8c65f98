"""Steps from which nothing is learnt, and gradients that are added up on the wrong scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from rankscope_server.diagnose.numerics.rates import linear_scaling, no_warm_up, over_ranks
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, ran, skipped
from rankscope_server.observe.facts import LossScale

_NEAR = 1e-3  # of a factor, which is written with six digits


class Learning:
    """Finds steps from which nothing is learnt, and accumulated gradients of the wrong scale."""

    name: ClassVar[str] = "learning"
    finds: ClassVar[str] = (
        "Steps from which nothing is learnt; losses of accumulated passes that are divided twice "
        "or not at all; a large batch without warm-up; a rate that was scaled in proportion to the "
        "batch for Adam"
    )
    needs: ClassVar[str] = (
        "five gradient norms or 20 losses; for accumulation graphs that the script has no hooks "
        "on; for warm-up the rate of the first steps and replicas; for the rule of scaling a rate "
        "on the command line, or an earlier attempt with another batch"
    )
    silent: ClassVar[str] = (
        "one value is another; networks that train in turn; losses that are sums, or whose "
        "division does not show; a rate that still rises"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return what is wrong with what the steps learn."""
        numbers = window.facts.numbers
        if not (numbers.steps("loss") or numbers.steps("gradient_norm")):
            return skipped(
                self, "no loss or gradient norm was recorded",
                "train with backward() or call rankscope.log_metrics(step, loss=...)",
            )  # fmt: skip
        found = [
            *_nothing_learnt(window), *_accumulation(window), *no_warm_up(window),
            *linear_scaling(window),
        ]  # fmt: skip
        checked = () if found else ("gradients: not exactly 0; loss: not always the same",)
        return ran(self, found, checked)


def _nothing_learnt(window: Window) -> Iterator[Finding]:
    if window.facts.numbers.alternates:  # networks train in turn: these numbers are of one of them
        return
    zero, constant = zero_norm_since(window), constant_losses(window)
    if zero is None and constant is None:
        return
    signs = []
    if zero is not None:
        signs.append(f"the norm of all gradients is exactly 0 since step {zero:,}")
    if constant is not None:
        some = sorted(set(constant))
        many = f"{some[0]:.6g}" + (f" to {some[-1]:.6g} by rank" if len(some) > 1 else "")
        signs.append(f"the loss is {many} in every step, to the last bit")
    is_all_learnt = zero is not None and constant is None and _is_zero_loss(window, zero)
    why = "; ".join(signs)
    yield window.finding(
        "nothing_learnt",
        "nothing",
        severity="info" if is_all_learnt else "warning",
        onset_step=1 if constant is not None else zero,
        what=f"Nothing is learnt{'' if zero is None or zero <= 1 else f' since step {zero:,}'}: "
        + ("no gradient reaches the weights" if zero is not None else "the loss never changes"),
        why=why[0].upper() + why[1:] + ("; the loss is 0: there is no more to learn from this data"
                                        if is_all_learnt else ""),
        next=(
            "Look for what cuts the graph between the weights and the loss: `detach`, `no_grad`, "
            "`argmax`, an activation that is dead, a softmax over one class, a product with 0"
            if zero is not None
            else "See that the optimizer was given the parameters of this model, after it was "
            "moved and wrapped, and that its learning rate is not 0"
        ),
        confidence=(0.95, "loss and gradients say the same") if len(signs) == 2
        else (0.85, "exact values, many times"),
        disproof="Another optimizer of the script learns, whose gradients are not among these",
    )  # fmt: skip


def zero_norm_since(window: Window) -> int | None:
    """Return the step since which the norm of the gradients is 0 on all ranks; None: it is not."""
    numbers, policy = window.facts.numbers, window.policy
    steps = numbers.steps("gradient_norm")
    largest = over_ranks(numbers.matrix("gradient_norm", steps), np.fmax)
    other = np.flatnonzero(largest != 0)
    first = int(other[-1]) + 1 if len(other) else 0
    zero = steps[first:]
    if len(zero) < policy.zero_norm_values or zero[-1] - zero[0] < policy.zero_norm_steps:
        return None
    is_from_first = first == 0 and steps[0] == numbers.head("gradient_norm")[0]
    return 1 if is_from_first else zero[0]


def constant_losses(window: Window) -> list[float] | None:
    """Return the loss of each rank if none ever changed, None if one did, or too few are known."""
    numbers, policy = window.facts.numbers, window.policy
    steps = sorted({*numbers.head("loss"), *numbers.steps("loss")})
    values = numbers.matrix("loss", steps)
    values = values[~np.isnan(values).all(axis=1)]
    if not len(values) or (~np.isnan(values)).sum(axis=1).min() < policy.constant_loss_values:
        return None
    least, most = np.nanmin(values, axis=1), np.nanmax(values, axis=1)
    return [float(value) for value in least] if (least == most).all() else None


def _is_zero_loss(window: Window, since: int) -> bool:
    numbers = window.facts.numbers
    steps = [step for step in numbers.steps("loss") if step >= since]
    values = numbers.matrix("loss", steps)
    return bool(steps) and not np.nansum(np.abs(values))


def _accumulation(window: Window) -> Iterator[Finding]:
    scales = window.facts.loss_scales
    said = {(one.passes, one.local, one.factors, one.reduction) for one in scales.values()}
    if len(said) != 1:  # none, or ranks that do unlike things
        return
    scale = max(scales.values())
    times = _divided(scale)
    if times is None:
        return
    passes = scale.passes
    is_twice = times == 2
    yield window.finding(
        "accumulation",
        "accumulation",
        onset_step=scale.step or None,
        what=(
            f"The loss is divided by {passes} twice, so that the gradient is {passes} times too "
            "small" if is_twice
            else f"The loss of the {passes} passes of a step is not divided by {passes}, so that "
            f"the gradient is {passes} times too large"
        ),
        why=f"{passes} backward passes make one step" + (
            f", and before each the mean loss is divided by {passes} two times" if is_twice
            else f", of which {scale.local} keep their gradients on the rank (no_sync); each begins"
            " at a mean loss as it is, and gradients add up"
        ),
        next=(
            "Divide once: Accelerate, DeepSpeed and the Hugging Face Trainer do it for you"
            if is_twice
            else f"Divide the loss by {passes} before each backward(), or the gradient once"
        ) + ". SGD then needs the learning rate that the step was meant for; Adam changes by its "
        "clipping and epsilon alone",
        confidence=(
            (0.9, "the graph of each pass shows both divisions") if is_twice
            else (0.75, "no division shows in the graph, and none of the gradient can be seen")
        ),
        disproof="The learning rate or a later division makes up for it, or the passes are of "
        "several losses that are meant to be added",
    )  # fmt: skip


def _divided(scale: LossScale) -> int | None:
    """Return how often the number of passes divides the loss if that is wrong: 2 or 0; or None."""
    passes = scale.passes
    if passes < 2 or scale.reduction != "mean":
        return None
    product = math.prod(scale.factors)
    is_passes = [abs(factor / passes - 1) < _NEAR for factor in scale.factors]
    if abs(product / passes**2 - 1) < _NEAR and sum(is_passes) == 2:
        return 2
    is_plain = abs(product - 1) < _NEAR and scale.local == passes - 1
    return 0 if is_plain else None
