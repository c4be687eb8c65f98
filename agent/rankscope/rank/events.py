"""The moments of a step at which hooks hear of each other; all in the main thread.

The hooks of the phases say when something happens, others listen. A listener is guarded, so one
that fails neither harms the run nor the listeners behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


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
        # of these three, `..._due` also has those that listen on sampled steps only
        self.backward: list[Callable[[Any], None]] = []  # a backward pass begins at these tensors
        self.scaled: list[Callable[[Any], None]] = []  # a gradient scaler scaled this loss
        self.optimizer: list[Callable[[Any], None]] = []  # this optimizer is about to step
        self.step: list[Callable[[EndedStep], None]] = []  # a step ended
        self.backward_due: list[Callable[[Any], None]] = []
        self.optimizer_due: list[Callable[[Any], None]] = []
        self.step_due: list[Callable[[EndedStep], None]] = []
        self.failure: list[Callable[[BaseException], None]] = []  # an exception goes by
        self.group: list[Callable[[GroupMade], None]] = []  # before its first collective


def listen(
    agent: Agent, moment: str, listener: Callable[[Any], Any], *, sampled: bool = False
) -> None:
    """Call `listener` at each moment of this name until the agent's hooks are taken out.

    `sampled`: only in steps whose numbers will be written. A call that finds nothing to do costs
    some microseconds too.
    """
    safe = guarded(listener)
    for name in (f"{moment}_due",) if sampled else (moment, f"{moment}_due"):
        listeners: list[Callable[[Any], Any]] | None = getattr(agent.moments, name, None)
        if listeners is not None:
            listeners.append(safe)
            agent.undo.append(_remover(listeners, safe))


def _remover(listeners: list[Callable[[Any], Any]], listener: Any) -> Callable[[], None]:
    return lambda: listeners.remove(listener)
