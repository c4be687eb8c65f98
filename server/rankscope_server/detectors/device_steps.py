"""Steps on the clock of devices, for ranks whose hosts only enqueue what their devices do.

With NCCL a host waits for its own device, if at all, and then all ranks seem to work for as long as
the step takes. The agent also measures phases on the device's stream, with events where the phase
changes. If DDP issues all collectives of a step in the backward pass, that is where the stream
waits for other ranks: what a rank's pass takes longer than the shortest of all ranks counts as
waiting. So a rank that computes longer in its backward passes alone is not told from one that
waits, and is not named; every other phase is its own work, be it of its device or of its host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.schema import FLAG_BY_ENGINE, PHASES
from rankscope_server.detectors.event_table import EventTable
from rankscope_server.detectors.step_table import SPECIAL, StepTable

_NAMES = {f"gpu_{phase}_seconds": at for at, phase in enumerate(PHASES)}
_BACKWARD = PHASES.index("backward")
_MAX_WAITING = 128  # sampled steps of which something has not come yet
_NS_PER_S, _NS_PER_MS = 1e9, 1e6


class DeviceSteps:
    """Fills `table` with the steps of which phases, collectives and host times are all known."""

    def __init__(self) -> None:
        self.table = StepTable()
        self._told: dict[int, dict[int, NDArray[np.float64]]] = {}  # step -> rank -> phases, ns

    def put(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Take what one rank measured in one step, if that is the device's phases."""
        phases = [(at, values[name]) for name, at in _NAMES.items() if name in values]
        if not phases:
            return
        times = np.zeros(len(PHASES))
        for at, seconds in phases:
            times[at] = max(seconds, 0.0) * _NS_PER_S
        self._told.setdefault(step, {})[rank] = times
        if len(self._told) > _MAX_WAITING:
            del self._told[min(self._told)]

    def renew(self, steps: StepTable, events: EventTable, ranks: Iterable[int]) -> None:
        """Move what is complete into the table; `steps` are those of the hosts."""
        wanted = sorted(ranks)
        numbers = self._complete(steps, events, wanted)
        if not len(numbers):
            return
        told = [self._told.pop(step) for step in numbers.tolist()]
        times = np.stack([[one[rank] for rank in wanted] for one in told])
        calls = events.select(numbers)
        others = calls["step"][(calls["flags"] & FLAG_BY_ENGINE) == 0]
        counts = ~np.isin(numbers, others)
        if counts.any():
            self._fill(steps, wanted, numbers[counts], times[counts])

    def _complete(self, steps: StepTable, events: EventTable, ranks: list[int]) -> NDArray[Any]:
        """Return the steps of which everything is known of all ranks."""
        if len(ranks) < 2 or not steps.row_of.keys() >= set(ranks):
            return np.zeros(0, np.int64)
        told = [step for step, of in self._told.items() if of.keys() >= set(ranks)]
        numbers = np.intersect1d(np.array(told, np.int64), steps.steps)
        if not len(numbers):
            return numbers
        is_known = ~np.isnan(_of(steps, "duration", ranks, numbers)).any(axis=0)
        for rank in ranks:
            is_known &= events.is_seen(rank, numbers)
        found: NDArray[Any] = numbers[is_known]
        return found

    def _fill(
        self, steps: StepTable, ranks: list[int], numbers: NDArray[Any], times: NDArray[Any]
    ) -> None:
        """Write steps: `times` is steps x ranks x phases, in ns."""
        waited = times[:, :, _BACKWARD] - times[:, :, _BACKWARD].min(axis=1, keepdims=True)
        started_ms = _of(steps, "started_ms", ranks, numbers)
        flags = _of(steps, "flags", ranks, numbers) & SPECIAL
        for place, rank in enumerate(ranks):
            own = times[:, place]
            columns: dict[str, Any] = {
                "step": numbers,
                "started_ns": started_ms[place] * _NS_PER_MS,
                "duration_ns": own.sum(axis=1),
                "backward_blocked_ns": waited[:, place],
                "num_collectives": np.ones(len(numbers)),
                "flags": flags[place],
            }
            columns |= {f"{phase}_ns": own[:, index] for index, phase in enumerate(PHASES)}
            self.table.put(rank, columns)


def _of(steps: StepTable, metric: str, ranks: list[int], numbers: NDArray[Any]) -> NDArray[Any]:
    """Return a metric of some ranks, x steps that the table has."""
    at = np.searchsorted(steps.steps, numbers)
    cells: NDArray[Any] = steps.get(metric)[[steps.row_of[rank] for rank in ranks]][:, at]
    return cells
