"""Timelines as Horovod's rank 0 writes them (horovod/common/timeline.cc), from ready times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

EPOCH_US = 1_790_000_000_000_000


class TimelineFile:
    """Builds the text of a timeline, event by event, tensors as processes."""

    def __init__(self, epoch_us: int | None = EPOCH_US) -> None:
        self._events: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}
        if epoch_us is not None:
            args = {"start_time_since_epoch_in_micros": epoch_us}
            self._events.append({"name": "process_name", "ph": "M", "pid": 0, "args": args})

    def event(self, tensor: str, phase: str, at_us: int, name: str = "", **more: Any) -> None:
        """Add one event of a tensor; the first of a tensor names its process."""
        if tensor not in self._numbers:
            number = self._numbers[tensor] = len(self._numbers) + 1
            about: dict[str, Any] = {"ph": "M", "pid": number}
            self._events.append({"name": "process_name", **about, "args": {"name": tensor}})
            sort = {"sort_index": number}
            self._events.append({"name": "process_sort_index", **about, "args": sort})
        values = {"ph": phase, "ts": at_us, "pid": self._numbers[tensor]} | more
        self._events.append({**({"name": name} if name else {}), **values})

    def negotiate(self, tensor: str, ready_us: Mapping[int, int], kind: str = "ALLREDUCE") -> None:
        """Add the beginning of a negotiation, with a tick of each rank that is ready."""
        order = sorted(ready_us.items(), key=lambda item: item[1])
        self.event(tensor, "B", order[0][1], f"NEGOTIATE_{kind}")
        for rank, at_us in order:
            self.event(tensor, "X", at_us, str(rank), dur=0)

    def reduce(
        self, tensor: str, ready_us: Mapping[int, int], took_us: int, shape: Sequence[int] = (256,),
        kind: str = "ALLREDUCE",
    ) -> int:  # fmt: skip
        """Add a whole collective; return when it ended."""
        self.negotiate(tensor, ready_us, kind)
        self.event(tensor, "E", max(ready_us.values()))
        return self.process(tensor, max(ready_us.values()), took_us, shape, kind)

    def process(
        self, tensor: str, began_us: int, took_us: int, shape: Sequence[int] = (256,),
        kind: str = "ALLREDUCE",
    ) -> int:  # fmt: skip
        """Add what follows a negotiation, or the cache; return when it ended."""
        ended = began_us + took_us
        self.event(tensor, "B", began_us, kind)
        self.event(tensor, "B", began_us + 1, "GLOO_" + kind)
        self.event(tensor, "E", ended - 1)
        about = {"dtype": "float32", "shape": f"[{', '.join(map(str, shape))}]"}
        self.event(tensor, "E", ended, args=about)
        return ended

    def cycle(self, at_us: int) -> None:
        """Add the mark of a cycle, which belongs to no tensor."""
        self._events.append({"ph": "i", "name": "CYCLE_START", "ts": at_us, "s": "g"})

    def text(self) -> str:
        """Return the file as it is after the newest event."""
        return "[\n" + ",\n".join(json.dumps(event) for event in self._events) + "]"
