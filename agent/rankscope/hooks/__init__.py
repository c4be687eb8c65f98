"""Everything that the agent can watch in a training process, one hook each.

The tuple is the table of contents and the order of installation.
"""

from __future__ import annotations

from rankscope.hooks.base import Hook, HookSkipped
from rankscope.hooks.collectives import Collectives
from rankscope.hooks.copies import Copies
from rankscope.hooks.exceptions import Exceptions
from rankscope.hooks.flight_recorder import FlightRecorder
from rankscope.hooks.gpu_phases import GpuPhases
from rankscope.hooks.logs import Logs, Warnings
from rankscope.hooks.memory import Memory, OutOfMemory
from rankscope.hooks.numbers import (
    Batches,
    Clipping,
    Gradients,
    LearningRate,
    LightningLoss,
    Losses,
    ModelSize,
    OldLightningLoss,
    Replicas,
    TrainerLoss,
)
from rankscope.hooks.output import Output
from rankscope.hooks.pauses import GarbageCollection
from rankscope.hooks.phases import (
    Backward,
    Checkpointing,
    DataLoading,
    DistributedCheckpointing,
    Evaluation,
    GradientScaler,
    Optimizer,
    Pipeline,
    PipelineSchedule,
    Safetensors,
)
from rankscope.hooks.stacks import Stacks

HOOKS: tuple[type[Hook], ...] = (
    Exceptions,
    Stacks,
    Logs,
    Warnings,
    Output,
    Collectives,
    FlightRecorder,
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
    LearningRate,
    ModelSize,
    Batches,
    Clipping,
    Gradients,
    Replicas,
    Memory,
    OutOfMemory,
)

__all__ = ["HOOKS", "Hook", "HookSkipped"]


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
