"""Rankscope: watch, explain and search a distributed PyTorch run.

In a training script, only where you want to say more than the agent sees by itself:

    import rankscope

    rankscope.init()                          # or: rankscope run -- torchrun ... train.py
    rankscope.log_metrics(step, loss=loss)
    with rankscope.phase("evaluation"): ...
    rankscope.stage(rank, world_size)         # of a pipeline that the script itself writes

And where a run is looked at (`pip install 'rankscope[data]'`):

    with rankscope.open("my-run") as run:
        run.pandas("collectives", steps=(400, 500), ranks=[3])
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes 8 ms, which each Python program of a job would pay
if TYPE_CHECKING:
    from typing import Any

    from rankscope.rank.api import (
        LoggingHandler,
        init,
        log_metrics,
        phase,
        regrouped,
        set_step,
        stage,
        step,
    )

__version__ = "0.1.0"
__all__ = [
    "LoggingHandler", "init", "log_metrics", "phase", "regrouped", "set_step", "stage", "step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what is asked for: each Python program of a job comes by here."""
    if name == "open":  # not in __all__: `import *` is not to hide the built-in one
        return _open_run()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankscope.rank import api

    return getattr(api, name)


def _open_run() -> Any:
    from importlib import import_module  # by name: what runs in a rank never gets there

    try:
        return import_module("rankscope.data.run").open_run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rankscope"):
            raise
        raise ImportError("rankscope.open needs pyarrow: pip install 'rankscope[data]'") from error
