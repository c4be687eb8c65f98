"""Rankscope: watch, explain and search a distributed PyTorch run.

In a training script, only where you want to say more than the agent sees by itself:

    import rankscope

    rankscope.init()                          # or: rankscope run -- torchrun ... train.py
    rankscope.log_metrics(step, loss=loss)
    with rankscope.phase("evaluation"): ...
    rankscope.stage(rank, world_size)         # of a pipeline that the script itself writes
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes 8 ms, which each Python program of a job would pay
if TYPE_CHECKING:
    from typing import Any

    from rankscope.rank.api import LoggingHandler, init, log_metrics, phase, set_step, stage, step

__version__ = "0.1.0"
__all__ = ["LoggingHandler", "init", "log_metrics", "phase", "set_step", "stage", "step"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: each Python program of a job comes by here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankscope.rank import api

    return getattr(api, name)
