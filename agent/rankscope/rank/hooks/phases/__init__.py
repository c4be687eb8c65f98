"""Phases of a step without a change to the script, one file per source.

Forward has no hook of its own: module hooks cost 2.5 us per module call and disturb compiled
code. It is what lies between the data loader and the backward pass; see `rankscope.rank.steps`.
"""

from rankscope.rank.hooks.phases.backward import Backward
from rankscope.rank.hooks.phases.checkpoint import (
    Checkpointing,
    DistributedCheckpointing,
    Safetensors,
)
from rankscope.rank.hooks.phases.data import DataLoading
from rankscope.rank.hooks.phases.evaluation import Evaluation
from rankscope.rank.hooks.phases.optimizer import Optimizer
from rankscope.rank.hooks.phases.pipeline import Pipeline
from rankscope.rank.hooks.phases.scaler import GradientScaler
from rankscope.rank.hooks.phases.schedule import PipelineSchedule

__all__ = [
    "Backward",
    "Checkpointing",
    "DataLoading",
    "DistributedCheckpointing",
    "Evaluation",
    "GradientScaler",
    "Optimizer",
    "Pipeline",
    "PipelineSchedule",
    "Safetensors",
]
