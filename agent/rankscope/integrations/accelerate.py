"""For Accelerate: `Accelerator(log_with=RankscopeTracker())`, and `watch(accelerator)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate.tracking import GeneralTracker

import rankscope
from rankscope.integrations import numbers_of, training_begins
from rankscope.rank.attach import start as attach
from rankscope.rank.guard import guarded

_SAVING = ("save_state", "load_state", "save_model")


class RankscopeTracker(GeneralTracker):
    """Takes what `accelerator.log` and `accelerator.init_trackers` are given, on every rank."""

    name = "rankscope"
    requires_logging_directory = False
    main_process_only = False

    @property
    def tracker(self) -> RankscopeTracker:
        """Return what `accelerator.get_tracker` gives."""
        return self

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the configuration that the script names."""
        training_begins("accelerate", values)

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record numbers; without a step they belong to the one that ended last."""
        numbers = numbers_of(values) or {}
        if step is None:
            context = attach.context()
            step = 0 if context is None else context.clock.step - 1
        if numbers:
            rankscope.log_metrics(step, **numbers)


def watch(accelerator: Any) -> None:
    """Count saving and loading of states as checkpoint, and record how it is set up.

    Call it once, after the Accelerator is made. Its state files are not all written by
    torch.save, which is what is seen without this.
    """
    training_begins(
        "accelerate",
        {
            "distributed_type": getattr(accelerator.distributed_type, "value", None),
            "num_processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        },
    )
    for name in _SAVING:
        setattr(accelerator, name, _as_checkpoint(getattr(accelerator, name)))


def _as_checkpoint(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def saving(*args: Any, **kwargs: Any) -> Any:
        with rankscope.phase("checkpoint"):
            return method(*args, **kwargs)

    return saving
