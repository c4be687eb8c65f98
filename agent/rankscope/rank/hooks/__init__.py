"""Everything that the agent can watch in a training process, one hook each.

The tuple is the table of contents and the order of installation.
"""

from __future__ import annotations

from rankscope.rank.context import Hook
from rankscope.rank.hooks.collectives import Collectives
from rankscope.rank.hooks.exceptions import Exceptions
from rankscope.rank.hooks.flight_recorder import FlightRecorder
from rankscope.rank.hooks.gpu_phases import GpuPhases
from rankscope.rank.hooks.logs import Logs, Warnings
from rankscope.rank.hooks.memory import Memory, OutOfMemory
from rankscope.rank.hooks.numbers.batches import Batches
from rankscope.rank.hooks.numbers.gradients import Clipping, Gradients
from rankscope.rank.hooks.numbers.loss import LightningLoss, Losses, OldLightningLoss, TrainerLoss
from rankscope.rank.hooks.numbers.loss_scale import LossScale
from rankscope.rank.hooks.numbers.model import LearningRate, ModelSize
from rankscope.rank.hooks.numbers.replicas import Replicas
from rankscope.rank.hooks.numbers.sampling import Sampling
from rankscope.rank.hooks.output import Output
from rankscope.rank.hooks.pauses import Copies, GarbageCollection
from rankscope.rank.hooks.phases.backward import Backward
from rankscope.rank.hooks.phases.checkpoint import (
    Checkpointing,
    DistributedCheckpointing,
    Safetensors,
)
from rankscope.rank.hooks.phases.data import DataLoading
from rankscope.rank.hooks.phases.evaluation import Evaluation
from rankscope.rank.hooks.phases.optimizer import GradientScaler, Optimizer
from rankscope.rank.hooks.phases.pipeline import Pipeline, PipelineSchedule
from rankscope.rank.hooks.ray_train import RayTrain
from rankscope.rank.hooks.remote_calls import RemoteCalls
from rankscope.rank.hooks.stacks import Stacks
from rankscope.rank.hooks.trackers import Comet, MLflow, SwanLab, TensorBoard, Trackio, Wandb

HOOKS: tuple[type[Hook], ...] = (
    Exceptions,
    Stacks,
    Logs,
    Warnings,
    Output,
    Collectives,
    FlightRecorder,
    RemoteCalls,
    DataLoading,
    Evaluation,
    Backward,
    Optimizer,
    GradientScaler,
    Checkpointing,
    DistributedCheckpointing,
    Safetensors,
    Pipeline,
    PipelineSchedule,
    GarbageCollection,
    Copies,
    GpuPhases,
    Losses,
    TrainerLoss,
    LightningLoss,
    OldLightningLoss,
    LossScale,
    LearningRate,
    ModelSize,
    Batches,
    Sampling,
    Clipping,
    Gradients,
    Replicas,
    Memory,
    OutOfMemory,
    RayTrain,
    Wandb,
    MLflow,
    TensorBoard,
    Trackio,
    SwanLab,
    Comet,
)


def chosen(names: str) -> list[type[Hook]]:
    """Return the hooks that a setting names. Raises ValueError for an unknown name."""
    if names in ("all", "none"):
        return list(HOOKS) if names == "all" else []
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {hook.name: hook for hook in HOOKS}
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"RANKSCOPE_HOOKS names {name!r}; there are: {', '.join(known)}, all, none"
            )
    return [hook for hook in HOOKS if hook.name in wanted]
