"""Steps on the clock of devices, for ranks whose hosts only enqueue what their devices do.

With NCCL a host waits for its own device, if at all, and then all ranks seem to work for as long as
the step takes. The agent also measures phases on the device's stream, and in them what the stream
waited for other ranks; where all ranks have measured that, it is taken as it is.

Where it is not known: if DDP issues the collectives of a step in the backward pass, that is where
the stream waits for other ranks: what a rank's pass takes longer than the shortest of all ranks
counts as waiting. So a rank that computes longer in its backward passes alone looks like one that
waits, and is not named; every other phase is its self time, be it of its device or of its host.
Other collectives may be in such a step where all ranks wait in them for all others alike: then no
rank's phase is longer than another's because of them, so that a rank that stands out is slow. But
what all wait there for one of them is not seen: no rank is called healthy by such steps. A
broadcast, or a group of some ranks, would make victims look slow: a step with one is not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.wire.metric_names import GPU_SECONDS, GPU_WAIT_SECONDS
from rankscope.wire.schema import FLAG_BY_ENGINE, PHASES, STEP_COLUMNS
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.event_table import EventTable
from rankscope_server.observe.step_table import SPECIAL, StepTable

_NAMES = {GPU_SECONDS[phase]: at for at, phase in enumerate(PHASES)}
_WAITS = {GPU_WAIT_SECONDS[phase]: at for at, phase in enumerate(PHASES)}
_BACKWARD = PHASES.index("backward")
# operations that no rank ends before all have come
_ALIKE = frozenset({
    "all_reduce", "all_reduce_coalesced", "barrier", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single",
})  # fmt: skip
_MAX_WAITING = 256  # sampled steps of which something has not come yet
_NS_PER_S, _NS_PER_MS = 1e9, 1e6


class DeviceSteps:
    """Fills `table` with the steps of which phases, collectives and host times are all known.

    `sure` are the newest of those in which no rank can wait but in the backward pass.
    """

    def __init__(self) -> None:
        self.table = StepTable()
        self.sure: deque[int] = deque(maxlen=POLICY.min_steps)
        self._knows_waits = False  # from then on other steps do not count: they are unlike these
        # step -> rank -> (what the phases took, what was waited in them), ns; nan: not known
        self._waiting: dict[int, dict[int, NDArray[np.float64]]] = {}

    def put(self, rank: int, step: int, values: Mapping[str, float]) -> None:
        """Take what one rank measured in one step, if that is the device's phases."""
        phases = [(at, values[name]) for name, at in _NAMES.items() if name in values]
        if not phases:
            return
        times = np.zeros((2, len(PHASES)))
        for at, seconds in phases:
            times[0, at] = max(seconds, 0.0) * _NS_PER_S
        waits = [(at, values[name]) for name, at in _WAITS.items() if name in values]
        if not waits:
            times[1] = np.nan
        for at, seconds in waits:
            times[1, at] = min(max(seconds, 0.0) * _NS_PER_S, times[0, at])
        self._waiting.setdefault(step, {})[rank] = times
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[min(self._waiting)]

    def renew(
        self, steps: StepTable, events: EventTable, ranks: Iterable[int],
        groups: Mapping[tuple[int, str], tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Move what is complete into the table; `steps` are those of the hosts."""
        wanted = sorted(ranks)
        numbers = self._complete(steps, wanted)
        if not len(numbers):
            return
        times = np.stack([
            [self._waiting[step][rank] for rank in wanted] for step in numbers.tolist()
        ])  # fmt: skip
        is_measured = ~np.isnan(times[:, :, 1]).any(axis=(1, 2))
        if is_measured.any():
            if not self._knows_waits:
                self._knows_waits, self.table = True, StepTable()
                self.sure.clear()
            self.sure.extend(numbers[is_measured].tolist())
            self._fill(steps, wanted, numbers[is_measured], times[is_measured])
        is_done = np.array([events.is_seen(rank, numbers) for rank in wanted]).all(axis=0)
        if not self._knows_waits:
            self._suppose(steps, events, wanted, numbers[is_done], times[is_done], groups)
        for step in numbers[is_measured | is_done].tolist():
            del self._waiting[step]

    def _suppose(
        self, steps: StepTable, events: EventTable, wanted: list[int], numbers: NDArray[Any],
        times: NDArray[Any], groups: Mapping[tuple[int, str], tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Move steps of whose waiting only the place is known; their collectives are."""
        calls = events.select(numbers)
        whole = [
            len(groups.get((wanted[0], name), ())) == len(wanted) for name in events.words("group")
        ]
        alike = [name in _ALIKE for name in events.words("operation")]
        is_alike = _at(whole, calls["group"]) & _at(alike, calls["operation"])
        is_engines = (calls["flags"] & FLAG_BY_ENGINE) != 0
        counts = ~np.isin(numbers, calls["step"][~is_alike & ~is_engines])
        self.sure.extend(np.setdiff1d(numbers, calls["step"][~is_engines]).tolist())
        if counts.any():
            passes = times[counts, :, 0, _BACKWARD]
            times = np.nan_to_num(times[counts])
            times[:, :, 1, _BACKWARD] = passes - passes.min(axis=1, keepdims=True)
            self._fill(steps, wanted, numbers[counts], times)

    def _complete(self, steps: StepTable, ranks: list[int]) -> NDArray[Any]:
        """Return the steps of which the times are known of all ranks, on both clocks."""
        if len(ranks) < 2 or not steps.row_of.keys() >= set(ranks):
            return np.zeros(0, np.int64)
        complete = [step for step, of in self._waiting.items() if of.keys() >= set(ranks)]
        numbers = np.intersect1d(np.array(complete, np.int64), steps.steps)
        if not len(numbers):
            return numbers
        found: NDArray[Any] = numbers[~np.isnan(_of(steps, "duration", ranks, numbers)).any(axis=0)]
        return found

    def _fill(
        self, steps: StepTable, ranks: list[int], numbers: NDArray[Any], times: NDArray[Any]
    ) -> None:
        """Write steps: `times` is steps x ranks x (took, waited) x phases, in ns."""
        started_ms = _of(steps, "started_ms", ranks, numbers)
        flags = _of(steps, "flags", ranks, numbers) & SPECIAL
        for place, rank in enumerate(ranks):
            took, waited = times[:, place, 0], times[:, place, 1]
            columns: dict[str, Any] = {
                "step": numbers,
                "started_ns": started_ms[place] * _NS_PER_MS,
                "duration_ns": took.sum(axis=1),
                "num_collectives": np.ones(len(numbers)),
                "flags": flags[place],
            }
            for index, phase in enumerate(PHASES):
                columns[f"{phase}_ns"] = took[:, index]
                has_own = f"{phase}_blocked_ns" in STEP_COLUMNS
                name = f"{phase}_blocked_ns" if has_own else "other_blocked_ns"
                columns[name] = columns.get(name, 0.0) + waited[:, index]
            self.table.put(rank, columns)


def _at(values: list[bool], places: NDArray[Any]) -> NDArray[np.bool_]:
    """Return `values` at some places, False beyond their end."""
    padded = np.array([*values, False])
    found: NDArray[np.bool_] = padded[np.minimum(places, len(values))]
    return found


def _of(steps: StepTable, metric: str, ranks: list[int], numbers: NDArray[Any]) -> NDArray[Any]:
    """Return a metric of some ranks, x steps that the table has."""
    at = np.searchsorted(steps.steps, numbers)
    cells: NDArray[Any] = steps.get(metric)[[steps.row_of[rank] for rank in ranks]][:, at]
    return cells
