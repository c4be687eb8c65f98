"""A rank that leaves a collective out, as after an `if` that only it takes."""

from typing import ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call


class CollectiveSkipped(CollectiveFault):
    """The rank leaves out the first collective of a step, and is one behind from then on."""

    name: ClassVar[str] = "collective_skipped"

    def act(self, call: Call) -> None:
        """Tell the caller that it is done."""
        call.leave_out()
