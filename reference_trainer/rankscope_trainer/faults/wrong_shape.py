"""A rank that brings fewer numbers into a collective than its peers, as from a shorter batch."""

from typing import ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call


class WrongShape(CollectiveFault):
    """The rank enters the first all_reduce of a step with half as many numbers as the others."""

    name: ClassVar[str] = "wrong_shape"
    operations: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def act(self, call: Call) -> None:
        """Reduce only the first half."""
        halves = [tensor.view(-1)[: tensor.numel() // 2] for tensor in call.tensors()]
        call.result, call.is_made = call.make(arguments=[halves, *call.arguments[1:]]), True
