"""A rank that makes a collective twice, as a retry does that only it takes."""

from typing import ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call, wait_for


class CollectiveDoubled(CollectiveFault):
    """The rank makes the first collective of a step twice, and is one ahead from then on."""

    name: ClassVar[str] = "collective_doubled"

    def act(self, call: Call) -> None:
        """Make it, wait for it, and make it again."""
        wait_for(call.make())
        call.result, call.is_made = call.make(), True
