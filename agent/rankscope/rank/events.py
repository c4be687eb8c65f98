"""The events of a step that hooks report to each other; all in the main thread.

The hooks of the phases report them, others listen. A listener is guarded, so one that fails harms
neither the run nor the listeners after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope.rank.group import GroupMade
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep


class Events:
    """Lists of listeners, one list per event."""

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
        self.failure: list[Callable[[BaseException], None]] = []  # an exception leaves a pass
        self.group: list[Callable[[GroupMade], None]] = []  # before its first collective

    def listen(
        self, event: str, listener: Callable[[Any], Any], *, sampled: bool = False
    ) -> Callable[[], None]:
        """Call `listener` at each event of this name, until the function returned is called.

        `sampled`: only in steps whose metrics will be written. A call that finds nothing to do
        costs some microseconds too.
        """
        safe = guarded(listener)
        names = (f"{event}_due",) if sampled else (event, f"{event}_due")
        lists: list[list[Callable[[Any], Any]]] = [
            getattr(self, name) for name in names if hasattr(self, name)
        ]
        for listeners in lists:
            listeners.append(safe)

        def remove() -> None:
            for listeners in lists:
                listeners.remove(safe)

        return remove
