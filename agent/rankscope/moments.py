"""The moments of a step at which hooks hear of each other; all in the main thread.

The hooks of the phases say when something happens, others listen. A listener is guarded, so one
that fails neither harms the run nor the listeners behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.guard import guarded
from rankscope.steps import EndedStep

if TYPE_CHECKING:
    from rankscope.runtime import Agent


@dataclass(frozen=True)
class GroupMade:
    """A process group that this rank is about to use for the first time."""

    backend: str
    label: str  # as the recorder names it
    process_group: Any  # not to be kept: that would keep the group alive


class Moments:
    """Lists of listeners, one list per moment."""

    def __init__(self) -> None:
        self.batch: list[Callable[[Any], None]] = []  # a data loader gave this batch
        self.backward: list[Callable[[Any], None]] = []  # a backward pass begins at these tensors
        self.scaled: list[Callable[[Any], None]] = []  # a gradient scaler scaled this loss
        self.optimizer: list[Callable[[Any], None]] = []  # this optimizer is about to step
        self.step: list[Callable[[EndedStep], None]] = []  # a step ended
        self.failure: list[Callable[[BaseException], None]] = []  # an exception goes by
        self.group: list[Callable[[GroupMade], None]] = []  # before its first collective


def listen(agent: Agent, moment: str, listener: Callable[[Any], Any]) -> None:
    """Call `listener` at each moment of this name until the agent's hooks are taken out."""
    listeners: list[Callable[[Any], Any]] = getattr(agent.moments, moment)
    safe = guarded(listener)
    listeners.append(safe)
    agent.undo.append(lambda: listeners.remove(safe))
