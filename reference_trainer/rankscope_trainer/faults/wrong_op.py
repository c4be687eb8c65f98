"""A rank that enters another operation than its peers."""

from typing import ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call


class WrongOp(CollectiveFault):
    """The rank calls broadcast where the others call all_reduce."""

    name: ClassVar[str] = "wrong_op"
    operations: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def act(self, call: Call) -> None:
        """Broadcast from rank 0 in the same group, with the same tensors."""
        import torch

        arguments = [call.tensors(), call.arguments[1], 0, 0]
        overload = torch.ops.c10d.broadcast_.default
        call.result, call.is_made = call.make(overload, arguments), True
