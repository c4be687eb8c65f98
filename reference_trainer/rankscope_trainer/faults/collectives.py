"""Calls into torch.distributed, made changeable for the faults of one rank.

The functions of the module `torch.distributed` are replaced, as a program that calls them wrongly
would differ: above everything that may watch them. What C++ sends by itself (DDP's reducer) does
not pass here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

FUNCTIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


@dataclasses.dataclass
class Call:
    """One call that is about to be made; a fault changes its arguments, or makes it itself."""

    operation: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    is_made: bool = False  # True: the fault has made the call, or leaves it out
    result: Any = None

    def make(self) -> Any:
        """Make the call as it now stands."""
        return self.function(*self.arguments, **self.keywords)


class Calls:
    """Replaces the functions, and puts them back."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        """Remember whom to ask about each call."""
        self._on_call = on_call
        self._originals: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Put a function that asks first in the place of each."""
        import torch.distributed as dist

        for operation in FUNCTIONS:
            self._originals[operation] = getattr(dist, operation)
            setattr(dist, operation, self._asking(operation))

    def remove(self) -> None:
        """Put back what was there."""
        import torch.distributed as dist

        for operation, original in self._originals.items():
            setattr(dist, operation, original)
        self._originals.clear()

    def _asking(self, operation: str) -> Callable[..., Any]:
        original = self._originals[operation]

        def asking(*arguments: Any, **keywords: Any) -> Any:
            call = Call(operation, original, arguments, keywords)
            self._on_call(call)
            return call.result if call.is_made else call.make()

        return asking
