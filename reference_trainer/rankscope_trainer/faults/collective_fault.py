"""What the faults at a collective share: which call they act on, and that they act on one."""

from __future__ import annotations

from typing import ClassVar

from rankscope_trainer.faults.collectives import Call
from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class CollectiveFault(Fault):
    """Acts on the first suitable collective of its steps, and on no other."""

    finding: ClassVar[str] = "desync"
    place: ClassVar[Place] = Place.COLLECTIVE
    operations: ClassVar[tuple[str, ...]] = ()  # only on these; none: on all but barriers

    def __init__(self) -> None:
        """Nothing was done yet."""
        self._is_done = False

    def is_due(self, context: FaultContext) -> bool:
        """Tell whether this is the call to act on."""
        assert context.call is not None
        operation = context.call.operation
        suits = operation in self.operations if self.operations else operation != "barrier"
        return suits and not self._is_done

    def fire(self, context: FaultContext) -> None:
        """Act on the call, and note which it was."""
        call = context.call
        assert call is not None
        self._is_done = True
        elements = sum(tensor.numel() for tensor in call.tensors())
        context.tell(operation=call.operation, num_elements=elements)
        self.act(call)

    def act(self, call: Call) -> None:
        """Make the call in another way, or leave it out."""
        raise NotImplementedError
