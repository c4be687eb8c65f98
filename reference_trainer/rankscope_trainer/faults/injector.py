"""Fires the planned faults of this rank at their places, and measures the rank's own compute."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rankscope_trainer.faults.fault import FaultContext, Place
from rankscope_trainer.faults.manifest import Manifest
from rankscope_trainer.faults.plan import FaultPlan

# A backward costs about two forwards (the 2 + 4 FLOPs for each parameter and token of the usual
# 6 N D), so the compute of a step is about three forwards. Only the forward is measured: in DDP
# the backward contains waiting for other ranks, which is not this rank's own.
COMPUTE_PER_FORWARD = 3.0
FORWARDS_REMEMBERED = 256


@dataclasses.dataclass
class _Active:
    """A plan and what became of it."""

    plan: FaultPlan
    fired: int = 0
    last_step: int = 0
    is_over: bool = False


class Injector:
    """The faults of one rank; it does nothing, and costs nothing, on ranks without any."""

    def __init__(
        self,
        plans: Sequence[FaultPlan],
        *,
        rank: int,
        microbatches: int,
        manifest: Manifest,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the plans of this rank."""
        self._faults = [_Active(plan) for plan in plans if plan.rank == rank]
        self._rank = rank
        self._microbatches = microbatches
        self._manifest = manifest
        self._sleep = sleep
        self._step = 0
        self._forward_seconds: deque[float] = deque(maxlen=FORWARDS_REMEMBERED)

    def begin_step(self, step: int) -> None:
        """Tell which step runs from now on; faults that ended with the last one are written."""
        self._step = step
        for active in self._faults:
            if active.fired and not active.plan.covers(step):
                self._end(active)

    def fire(self, place: Place) -> None:
        """Fire the faults that are on at `place` in this step."""
        for active in self._faults:
            if active.plan.fault.place is place and active.plan.covers(self._step):
                self._fire(active)

    def inject_into(self, module: Any) -> None:
        """Make `Place.FORWARD` a part of the module's forward, and measure the rest of it.

        Replacing `forward` itself puts the delay inside all hooks that an observer may have
        registered, in whatever order: it sees what it would see if the computation were slow.
        """
        if not self._faults:
            return
        original = module.forward

        def forward(*inputs: Any) -> Any:
            started = time.perf_counter()
            outputs = original(*inputs)
            self._forward_seconds.append(time.perf_counter() - started)
            self.fire(Place.FORWARD)
            return outputs

        module.forward = forward

    def close(self) -> None:
        """Write the end of the faults that are still on."""
        for active in self._faults:
            if active.fired:
                self._end(active)

    def _fire(self, active: _Active) -> None:
        plan = active.plan
        context = FaultContext(
            rank=self._rank,
            step=self._step,
            magnitude=plan.size,
            compute_seconds=self._compute_seconds(),
            visits=self._microbatches if plan.fault.place is Place.FORWARD else 1,
            sleep=self._sleep,
        )
        if plan.size is not None and not context.delay_seconds():
            return  # nothing measured yet, in the first step: the fault starts with the second
        if not active.fired:
            self._manifest.write(
                fault=plan.fault.name,
                rank=self._rank,
                start_step=self._step,
                start_time_ns=time.time_ns(),
                size=None if plan.size is None else str(plan.size),
                pid=os.getpid(),
            )
        active.fired += 1
        active.last_step = self._step
        plan.fault.fire(context)

    def _end(self, active: _Active) -> None:
        if active.is_over:
            return
        active.is_over = True
        self._manifest.write(
            fault=active.plan.fault.name,
            rank=self._rank,
            end_step=active.last_step,
            end_time_ns=time.time_ns(),
            fired=active.fired,
        )

    def _compute_seconds(self) -> float:
        if not self._forward_seconds:
            return 0.0
        forward = statistics.median(self._forward_seconds)
        return COMPUTE_PER_FORWARD * forward * self._microbatches
