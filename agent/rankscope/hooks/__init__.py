"""Everything that the agent can watch in a training process, one hook each.

The tuple is the table of contents and the order of installation.
"""

from __future__ import annotations

from rankscope.hooks.base import Hook, HookSkipped
from rankscope.hooks.collectives import Collectives
from rankscope.hooks.logs import Exceptions, Logs, Warnings
from rankscope.hooks.phases import Backward, Checkpointing, DataLoading, Optimizer, Pipeline
from rankscope.hooks.stacks import Stacks

HOOKS: tuple[type[Hook], ...] = (
    Exceptions,
    Stacks,
    Logs,
    Warnings,
    Collectives,
    DataLoading,
    Backward,
    Optimizer,
    Checkpointing,
    Pipeline,
)

__all__ = ["HOOKS", "Hook", "HookSkipped"]
