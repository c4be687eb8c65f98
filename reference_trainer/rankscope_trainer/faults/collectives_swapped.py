"""A rank that makes two collectives in the other order."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from rankscope_trainer.faults.collective_fault import CollectiveFault
from rankscope_trainer.faults.collectives import Call
from rankscope_trainer.faults.fault import FaultContext


class CollectivesSwapped(CollectiveFault):
    """The rank makes a step's first two collectives that overlap in the other order.

    The first must wait for the second, so its caller must not wait for the first: DDP's buckets
    are such, as long as there are two. The two steps before tell; the fault acts in its third
    step at the earliest.
    """

    name: ClassVar[str] = "collectives_swapped"
    operations: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def __init__(self) -> None:
        """Nothing was seen yet."""
        super().__init__()
        self._seen: Counter[int] = Counter()  # by step
        self._held: tuple[Call, Any] | None = None

    def is_due(self, context: FaultContext) -> bool:
        """Tell whether this is the first of two such calls, or the second."""
        call = context.call
        assert call is not None
        if not super().is_due(context) or not call.is_async:
            return False
        self._seen[context.step] += 1
        if self._held is not None:
            return True
        before = self._seen[context.step - 1]
        return (
            self._seen[context.step] == 1
            and before >= 2  # DDP changes its buckets once, in the second step
            and before == self._seen[context.step - 2]
        )

    def fire(self, context: FaultContext) -> None:
        """Hold the first call back, then make the second, and the first after it."""
        import torch

        call = context.call
        assert call is not None
        if self._held is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            call.returns(future)
            self._held = (call, future)
            return
        self._is_done = True
        first, future = self._held
        call.result, call.is_made = call.make(), True
        second = torch._C._distributed_c10d.Work.unbox(first.make()[1]).get_future()
        second.add_done_callback(lambda done: future.set_result(done.value()))
        sizes = [sum(tensor.numel() for tensor in each.tensors()) for each in (first, call)]
        context.tell(operation=call.operation, num_elements_first=sizes[0])
        context.tell(num_elements_second=sizes[1])
