"""Calls into torch.distributed, made changeable for the faults of one rank.

Every call of a program, of DDP's C++ reducer and of torch's pipelining goes through PyTorch's
dispatcher as an operator `c10d::...`. A kernel for its autograd key runs before the operator
itself, and before anything that watches it at a later key (`BackendSelect`, where the agent is):
all of them see what the rank really does, as if it were the program itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# operator -> name of the operation
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
}
KEYS = ("AutogradCPU", "AutogradCUDA")


@dataclasses.dataclass
class InterceptedCall:
    """One call that is about to be made; a fault makes it in another way, or leaves it out."""

    operation: str
    overload: Any  # the operator itself
    arguments: list[Any]
    result: Any = None
    is_made: bool = False  # True: the fault has made the call, or left it out

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the operation is to fill, or to change."""
        return _flatten(self.arguments[0])

    def num_elements(self) -> int:
        """Count the numbers in these tensors."""
        return sum(tensor.numel() for tensor in self.tensors())

    @property
    def is_async(self) -> bool:
        """Return whether the caller goes on before the operation is done."""
        schema = self.overload._schema.arguments
        for position, argument in enumerate(schema):
            if argument.name in ("async_op", "asyncOp"):
                given = position < len(self.arguments)
                return bool(self.arguments[position] if given else argument.default_value)
        return True

    def make(self, overload: Any = None, arguments: Sequence[Any] | None = None) -> Any:
        """Make the call as it is, or with another operator or other arguments."""
        import torch

        chosen = self.overload if overload is None else overload
        with torch._C._AutoDispatchBelowAutograd():
            return chosen(*(self.arguments if arguments is None else arguments))

    def leave_out(self) -> None:
        """Return to the caller what a finished call would have returned."""
        import torch

        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result(self.tensors())
        self.returns(done)

    def returns(self, future: Any) -> None:
        """Return to the caller a work that is done when the future is."""
        from torch._C import _distributed_c10d

        # Not declared, but what torch's own Python backends use.
        create: Any = vars(_distributed_c10d)["_create_work_from_future"]
        work = create(future).boxed()
        has_tensors = len(self.overload._schema.returns) > 1
        self.replace_by((self.arguments[0], work) if has_tensors else work)

    def replace_by(self, result: Any) -> None:
        """Return this to the caller, and do not make the call any more."""
        self.result, self.is_made = result, True


class Calls:
    """Puts kernels before the operators, and takes them away again."""

    def __init__(self, on_call: Callable[[InterceptedCall], None]) -> None:
        """Call `on_call` before each call, once `install` was called."""
        self._on_call = on_call
        self._library: Any = None

    def install(self) -> None:
        """Put a kernel before each operator that passes its calls to `on_call` first."""
        import torch

        self._library = torch.library.Library("c10d", "IMPL")
        for name, operation in COLLECTIVES.items():
            overload = getattr(torch.ops.c10d, name).default
            for key in KEYS:
                self._library.impl(name, self._before(operation, overload), key)

    def remove(self) -> None:
        """Take the kernels away."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _before(self, operation: str, overload: Any) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            call = InterceptedCall(operation, overload, list(arguments))
            self._on_call(call)
            return call.result if call.is_made else call.make()

        return kernel


def wait_for(result: Any) -> None:
    """Wait until a call that was made is done."""
    from torch._C._distributed_c10d import Work

    work = result[1] if isinstance(result, tuple) else result
    Work.unbox(work).wait()


def _flatten(argument: Any) -> list[Tensor]:
    import torch

    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for part in argument for tensor in _flatten(part)]
