"""Rankscope: watch, explain and search a distributed PyTorch run.

In a training script, only where you want to say more than the agent sees by itself:

    import rankscope

    rankscope.init()                          # or: rankscope run -- torchrun ... train.py
    rankscope.log_metrics(step, loss=loss)
    with rankscope.phase("evaluation"): ...
"""

from rankscope.api import init, log_metrics, phase, set_step, step
from rankscope.logging_handler import LoggingHandler

__version__ = "0.1.0"
__all__ = ["LoggingHandler", "init", "log_metrics", "phase", "set_step", "step"]
