"""A rank that brings numbers of another kind into a collective."""

from typing import ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call, wait_for


class WrongDtype(CollectiveFault):
    """The rank enters the first all_reduce of a step with int32 where the others have float32."""

    name: ClassVar[str] = "wrong_dtype"
    operations: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def act(self, call: Call) -> None:
        """Reduce rounded numbers: of the same size, so gloo finds nothing wrong."""
        import torch

        rounded = [tensor.to(torch.int32) for tensor in call.tensors()]
        call.result = call.make(arguments=[rounded, *call.arguments[1:]])
        wait_for(call.result)
        for tensor, reduced in zip(call.tensors(), rounded, strict=True):
            tensor.copy_(reduced)
        call.leave_out()  # it is done
