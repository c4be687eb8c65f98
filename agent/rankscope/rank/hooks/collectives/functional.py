"""Waiting for functional collectives: `wait_tensor` is C++ and never comes through Work.wait.

Their work is known to torch by the tensor that receives the result, so here too: the Python
sources note the address of each result, and a kernel for the operator `wait_tensor` finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.outside import Registrations

_MOST_WAITING = 1024  # results that no caller waited for are forgotten, the oldest first
_now = time.monotonic_ns
WaitEnded = Callable[[int, bool, int, bool], None]  # slot number, on the host, duration, failed


class Results:
    """Where the results of the latest collectives lie: address -> (slot number, on the host)."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, bool]] = {}

    def note(self, tensors: Iterable[Any], number: int, on_host: bool) -> None:
        """Remember the tensors that receive a result."""
        places = self._places
        for tensor in tensors:
            address = tensor.data_ptr()
            places.pop(address, None)  # so that a new one comes after older ones
            places[address] = (number, on_host)
        while len(places) > _MOST_WAITING:
            try:
                del places[next(iter(places))]
            except (KeyError, StopIteration, RuntimeError):  # another thread was faster
                return

    def take(self, tensor: Any) -> tuple[int, bool] | None:
        """Return the collective whose result this tensor receives, once."""
        return self._places.pop(tensor.data_ptr(), None)


def patch_wait_tensor(
    context: Context, results: Results, wait_ended: WaitEnded, registrations: Registrations
) -> None:
    """Time the operator by a kernel of our own in front of torch's."""
    import torch

    packet = getattr(torch.ops._c10d_functional, "wait_tensor", None)
    if packet is None:
        context.sources["collectives/wait_tensor"] = "skipped: missing in this version"
        return
    redispatch, after = packet.default.redispatch, torch._C.DispatchKey.BackendSelect
    plain = torch.Tensor

    @guarded
    def find(tensor: Any) -> tuple[int, bool] | None:
        # while torch traces a program, a subclass takes the place of the tensor and has no address
        return results.take(tensor) if tensor.__class__ is plain else None

    ended = guarded(wait_ended)

    def wait_tensor(keyset: Any, tensor: Any) -> Any:
        known, began = find(tensor), _now()
        try:
            result = redispatch(keyset.remove(after), tensor)
        except BaseException:
            if known is not None:
                ended(*known, _now() - began, True)
            raise
        if known is not None:
            ended(*known, _now() - began, False)
        return result

    if not registrations.add("_c10d_functional", "wait_tensor", wait_tensor):
        context.sources["collectives/wait_tensor"] = "skipped: watched by another library"
