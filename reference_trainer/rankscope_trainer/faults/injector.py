"""Fires the planned faults of this rank at their places, and measures the rank's own compute."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankscope_trainer.faults.collectives import Call, Calls
from rankscope_trainer.faults.fault import (
    PLACES_OF_MICROBATCHES,
    FaultContext,
    Parts,
    Place,
)
from rankscope_trainer.faults.manifest import Manifest
from rankscope_trainer.faults.module_places import ModulePlaces
from rankscope_trainer.faults.plan import FaultPlan

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope_trainer.settings import Settings

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
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Injector:
    """The faults of one rank; it does nothing, and costs nothing, on ranks without any."""

    def __init__(
        self,
        plans: Sequence[FaultPlan],
        *,
        rank: int,
        world_size: int = 1,
        manifest: Manifest,
        microbatches: int = 1,
        attempt: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the plans of this rank."""
        self._faults = [_Active(plan) for plan in plans if plan.concerns(rank, attempt)]
        self._rank, self._world_size = rank, world_size
        self._microbatches = self._visits = microbatches
        self._manifest = manifest
        self._sleep = sleep
        self._step = 0
        self._trainer: Parts | None = None
        self._forward_seconds: deque[float] = deque(maxlen=FORWARDS_REMEMBERED)
        self._calls = Calls(self._fire_at_call)

    def start(self, settings: Settings) -> Settings:
        """Fire at `Place.START`; return the settings with which the run is built."""
        for active in self._faults:
            if active.plan.fault.place is Place.START:
                settings = self._visit(active, Place.START, settings=settings).settings or settings
        return settings

    def attach(self, trainer: Parts) -> None:
        """Hand the faults the trainer's parts, and put them into its modules and calls."""
        if not self._faults:
            return
        self._trainer = trainer
        for active in self._faults:
            active.plan.fault.prepare(self._rank)
        modules = _computed_modules(trainer.strategy.model)
        self._microbatches = trainer.strategy.microbatches
        self._visits = self._microbatches * len(modules)
        for module in modules:
            self.inject_into(module)
        if self._has(Place.COLLECTIVE):
            self._calls.install()

    def begin_step(self, step: int) -> None:
        """Tell which step runs from now on; faults that ended with the last one are written."""
        self._step = step
        for active in self._faults:
            if active.fired and not active.plan.covers(step):
                self._end(active)
        self.fire(Place.STEP)

    def fire(self, place: Place, **moment: Any) -> Tensor | None:
        """Fire the faults that are on at `place` in this step; return the tensor they leave."""
        for active in self._on_at(place):
            moment["tensor"] = self._visit(active, place, **moment).tensor
        tensor: Tensor | None = moment.get("tensor")
        return tensor

    def visit(self, place: Place, **moment: Any) -> None:
        """Fire where nothing is handed over that faults could replace."""
        self.fire(place, **moment)

    def visit_sample(self, sample: int) -> None:
        """Fire while one window of the data is read."""
        self.fire(Place.SAMPLE, sample=sample)

    def visit_worker(self) -> None:
        """Let faults act where a worker process puts a batch together."""
        for active in self._faults:
            active.plan.fault.act_in_worker()

    @contextlib.contextmanager
    def around(self, place: Place) -> Iterator[None]:
        """Fire the faults of `place`, and let them know when the work inside is done."""
        fired = [(active, self._visit(active, place)) for active in self._on_at(place)]
        try:
            yield
        finally:
            for active, context in fired:
                active.plan.fault.leave(context)

    def inject_into(self, module: Any) -> None:
        """Make forward and backward of a module places, and measure the rest of the forward."""
        if self._faults:
            ModulePlaces(
                fire=self.fire,
                on_forward=self._forward_seconds.append,
                step=lambda: self._step,
                microbatches=lambda: self._microbatches,
                watches_backward=self._has(Place.BACKWARD),
                watches_gradient=self._has(Place.BEFORE_REDUCE),
            ).inject_into(module)

    def close(self) -> None:
        """End the faults that are still on."""
        self._calls.remove()
        for active in self._faults:
            if active.fired:
                self._end(active)

    def _has(self, place: Place) -> bool:
        return any(active.plan.fault.acts_at(place) for active in self._faults)

    def _on_at(self, place: Place) -> Iterator[_Active]:
        for active in self._faults:
            if active.plan.fault.acts_at(place) and active.plan.covers(self._step):
                yield active

    def _fire_at_call(self, call: Call) -> None:
        self.fire(Place.COLLECTIVE, call=call)

    def _context(self, active: _Active, place: Place, **moment: Any) -> FaultContext:
        plan = active.plan
        return FaultContext(
            rank=self._rank,
            world_size=self._world_size,
            step=self._step,
            magnitude=plan.size,
            compute_seconds=self._compute_seconds(),
            place=place,
            visits=self._visits if place in PLACES_OF_MICROBATCHES else 1,
            sleep=self._sleep,
            peer=plan.peer,
            trainer=self._trainer,
            facts=active.facts,
            **moment,
        )

    def _visit(self, active: _Active, place: Place, **moment: Any) -> FaultContext:
        plan, context = active.plan, self._context(active, place, **moment)
        if plan.size is not None and plan.size.ratio is not None and not context.delay_seconds():
            return context  # nothing measured yet, in the first step: it starts with the second
        if not plan.fault.is_due(context):
            return context
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
        if active.fired == 1:
            plan.fault.begin(context)
        plan.fault.fire(context)
        return context

    def _end(self, active: _Active) -> None:
        if active.is_over:
            return
        active.is_over = True
        active.plan.fault.end(self._context(active, active.plan.fault.place))
        self._manifest.write(
            fault=active.plan.fault.name,
            rank=self._rank,
            end_step=active.last_step,
            end_time_ns=time.time_ns(),
            fired=active.fired,
            **active.facts,
        )

    def _compute_seconds(self) -> float:
        if not self._forward_seconds:
            return 0.0
        forward = statistics.median(self._forward_seconds)
        return COMPUTE_PER_FORWARD * forward * self._visits


def _computed_modules(model: Any) -> list[Any]:
    """Return the modules whose forward the rank calls: the model's, or those that it is a list of.

    A rank that holds several pipeline stages calls each by itself.
    """
    from torch import nn

    if isinstance(model, nn.ModuleList):
        return list(model)
    return list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
