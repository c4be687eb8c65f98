"""Faults at a collective: one rank makes another call than its peers, twice, or not at all."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from rankscope_trainer.faults.calls import InterceptedCall, wait_for
from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class CollectiveFault(Fault):
    """Acts on the first suitable collective of its steps, and on no other."""

    finding = "desync"
    place = Place.COLLECTIVE
    operations: ClassVar[tuple[str, ...]] = ("all_reduce",)  # only on these; none: not on barriers

    _is_done = False

    def is_due(self, context: FaultContext) -> bool:
        """Only the call to act on."""
        assert context.call is not None
        operation = context.call.operation
        suits = operation in self.operations if self.operations else operation != "barrier"
        return suits and not self._is_done

    def fire(self, context: FaultContext) -> None:
        """Act on the call, and note which it was."""
        call = context.call
        assert call is not None
        self._is_done = True
        context.note(operation=call.operation, num_elements=call.num_elements())
        self.act(call)

    def act(self, call: InterceptedCall) -> None:
        """Make the call in another way, or leave it out."""
        raise NotImplementedError


class CollectiveSkipped(CollectiveFault):  # an `if` that only one rank takes
    """The rank leaves out the first collective of a step, and is one behind from then on."""

    name = "collective_skipped"
    operations = ()

    def act(self, call: InterceptedCall) -> None:
        """Return to the caller as if it were done."""
        call.leave_out()


class CollectiveDoubled(CollectiveFault):  # a retry on one rank
    """The rank makes the first collective of a step twice, and is one ahead from then on."""

    name = "collective_doubled"
    operations = ()

    def act(self, call: InterceptedCall) -> None:
        """Make it, wait for it, and make it again."""
        wait_for(call.make())
        call.replace_by(call.make())


class WrongShape(CollectiveFault):  # a shorter batch on one rank
    """The rank enters the first all_reduce of a step with half as many numbers as the others."""

    name = "wrong_shape"

    def act(self, call: InterceptedCall) -> None:
        """Reduce only the first half."""
        halves = [tensor.view(-1)[: tensor.numel() // 2] for tensor in call.tensors()]
        call.replace_by(call.make(arguments=[halves, *call.arguments[1:]]))


class WrongDtype(CollectiveFault):
    """The rank enters the first all_reduce of a step with int32 where the others have float32."""

    name = "wrong_dtype"

    def act(self, call: InterceptedCall) -> None:
        """Reduce rounded numbers: of the same size, so gloo finds nothing wrong."""
        import torch

        rounded = [tensor.to(torch.int32) for tensor in call.tensors()]
        wait_for(call.make(arguments=[rounded, *call.arguments[1:]]))
        for tensor, reduced in zip(call.tensors(), rounded, strict=True):
            tensor.copy_(reduced)
        call.leave_out()  # it is done


class WrongOp(CollectiveFault):
    """The rank calls broadcast where the others call all_reduce."""

    name = "wrong_op"

    def act(self, call: InterceptedCall) -> None:
        """Broadcast from rank 0 in the same group, with the same tensors."""
        import torch

        arguments = [call.tensors(), call.arguments[1], 0, 0]
        call.replace_by(call.make(torch.ops.c10d.broadcast_.default, arguments))


class CollectivesSwapped(CollectiveFault):
    """The rank makes a step's first two collectives that overlap in the other order.

    The first must wait for the second, so its caller must not wait for the first: DDP's buckets
    are such, as long as there are two. The two steps before show it; the fault acts in its third
    step at the earliest.
    """

    name = "collectives_swapped"

    def __init__(self) -> None:
        """No call was counted yet."""
        self._calls: Counter[int] = Counter()  # by step
        self._first: tuple[InterceptedCall, Any] | None = (
            None  # held back, and what its caller waits for
        )

    def is_due(self, context: FaultContext) -> bool:
        """Only the first of two such calls, and the second."""
        call = context.call
        assert call is not None
        if not super().is_due(context) or not call.is_async:
            return False
        self._calls[context.step] += 1
        if self._first is not None:
            return True
        before = self._calls[context.step - 1]
        return (
            self._calls[context.step] == 1
            and before >= 2  # DDP changes its buckets once, in the second step
            and before == self._calls[context.step - 2]
        )

    def fire(self, context: FaultContext) -> None:
        """Hold the first call back, then make the second, and the first after it."""
        import torch

        call = context.call
        assert call is not None
        if self._first is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            call.returns(future)
            self._first = (call, future)
            return
        self._is_done = True
        first, future = self._first
        call.replace_by(call.make())
        second = torch._C._distributed_c10d.Work.unbox(first.make()[1]).get_future()
        second.add_done_callback(lambda done: future.set_result(done.value()))
        context.note(
            operation=call.operation,
            num_elements_first=first.num_elements(),
            num_elements_second=call.num_elements(),
        )
