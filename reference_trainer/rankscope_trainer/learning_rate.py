"""The learning rate of each step: warm-up, and scaling with the global batch.

    rate  |          ____________   learning_rate * scale
          |        /
          |      /                  scale = 1, global batch / base_batch  (linear: the gradient of
          |    /                    a larger batch is as large, but surer, so one step may replace
          |  /                      several), or its square root (for Adam, whose step does not
          +--------------- step     grow with the gradient, but whose noise falls by the root)
             warm_up

It is computed from the step alone, so that a resumed run needs no state of a scheduler; and from
the number of ranks there are, so that an elastic run whose global batch changes is scaled anew.
"""

from __future__ import annotations

import math

from rankscope_trainer.settings import Settings


def changes_learning_rate(settings: Settings) -> bool:
    """Return whether the optimizer's own learning rate is not to be left as it is."""
    return bool(settings.warm_up) or settings.scale_learning_rate != "none"


def doubt(settings: Settings) -> str:
    """Return what is doubtful about how the rate is scaled, empty where nothing is."""
    if settings.scale_learning_rate == "linear" and settings.optimizer == "adamw":
        return (
            "scale_learning_rate linear with adamw: Adam's step does not grow with the gradient, "
            "and its noise falls by the root of the batch; sqrt is meant for it, linear for sgd"
        )
    return ""


def learning_rate(settings: Settings, step: int, global_batch: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    ratio = global_batch / settings.base_batch
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.scale_learning_rate]
    warmth = min(1.0, step / settings.warm_up) if settings.warm_up else 1.0
    return settings.learning_rate * scale * warmth
