"""Small tensors of a GPU, read some steps later and without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_WAITING = 64  # readings under way; more are not taken
GIVE_UP_STEPS = 8  # a copy that is not done by then is forgotten


@dataclass(slots=True)
class _Reading:
    step: int
    name: str
    host: Any  # pinned copy
    done: Any  # event behind the copy
    convert: Callable[[Any], float] | None


class LateReader:
    """Copies to pinned memory, and what has become of them. Main thread only."""

    def __init__(self) -> None:
        self._waiting: deque[_Reading] = deque()
        self._free: list[tuple[Any, Any]] = []  # pinned tensors and events to use again

    @property
    def is_waiting(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._waiting)

    def add(
        self, step: int, name: str, tensor: Any, convert: Callable[[Any], float] | None = None
    ) -> None:
        """Copy a tensor on the current stream; nothing is kept of it."""
        import torch

        if len(self._waiting) >= MAX_WAITING or torch.cuda.is_current_stream_capturing():
            return
        tensor = tensor.detach()
        host, done = self._take(tensor.dtype, tensor.shape)
        host.copy_(tensor, non_blocking=True)
        done.record(torch.cuda.current_stream(tensor.device))
        self._waiting.append(_Reading(step, name, host, done, convert))

    def arrived(self, step: int) -> Iterator[tuple[int, str, float]]:
        """Yield (step, name, value) of each copy that is done; `step` is the one of now."""
        while self._waiting:
            reading = self._waiting[0]
            if reading.done.query():
                value = (reading.convert or float)(reading.host)
                self._free.append((reading.host, reading.done))
                self._waiting.popleft()
                yield reading.step, reading.name, value
            elif step - reading.step > GIVE_UP_STEPS:
                self._waiting.popleft()  # its memory may still be written: not used again
            else:
                return

    def _take(self, dtype: Any, shape: Any) -> tuple[Any, Any]:
        import torch

        for place, (host, _) in enumerate(self._free):
            if host.dtype == dtype and host.shape == shape:
                return self._free.pop(place)
        del self._free[MAX_WAITING:]
        host = torch.empty(shape, dtype=dtype, pin_memory=True)
        event: Any = torch.cuda.Event()
        return host, event
