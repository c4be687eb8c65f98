"""Fires the planned faults of this rank at their places, and measures the rank's own compute."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankscope_trainer.faults.calls import Calls
from rankscope_trainer.faults.fault import PLACES_OF_MICROBATCHES, FaultContext, Parts, Place
from rankscope_trainer.faults.plan import FaultPlan
from rankscope_trainer.json_lines import JsonLines

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
    """The faults of one rank; it does nothing, and costs nothing, on ranks without any.

    The manifest says what really fired: a line for the start of a fault, which is in the file
    before the fault acts, and one for its end.
    """

    def __init__(
        self,
        plans: Sequence[FaultPlan],
        *,
        rank: int,
        world_size: int = 1,
        manifest: JsonLines,
        microbatches: int = 1,
        attempt: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the plans of this rank."""
        self._faults = [_Active(plan) for plan in plans if plan.concerns(rank, attempt)]
        self._rank, self._world_size = rank, world_size
        self.microbatches = self._visits = microbatches
        self._manifest = manifest
        self._sleep = sleep
        self.step = 0
        self._trainer: Parts | None = None
        self._forward_seconds: deque[float] = deque(maxlen=FORWARDS_REMEMBERED)
        self._calls = Calls(lambda call: self.visit(Place.COLLECTIVE, call=call))

    def start(self, settings: Settings) -> Settings:
        """Fire at `Place.START`; return the settings with which the run is built."""
        for active in self._faults:
            if active.plan.fault.place is Place.START:
                settings = self._visit(active, Place.START, settings=settings).settings or settings
        return settings

    def attach(self, trainer: Parts) -> None:
        """Give the faults the trainer's parts, and put them into its modules and calls."""
        if not self._faults:
            return
        self._trainer = trainer
        for active in self._faults:
            active.plan.fault.prepare(self._rank)
        modules = _computed_modules(trainer.strategy.model)
        self.microbatches = trainer.strategy.microbatches
        self._visits = self.microbatches * len(modules)
        for module in modules:
            self.inject_into(module)
        if self._has(Place.COLLECTIVE):
            self._calls.install()

    def begin_step(self, step: int) -> None:
        """Note the step that runs from now on; faults that ended with the last one are written."""
        self.step = step
        for active in self._faults:
            if active.fired and not active.plan.covers(step):
                self._end(active)
        self.fire(Place.STEP)

    def fire(self, place: Place, **details: Any) -> Tensor | None:
        """Fire the faults that are on at `place` in this step; return the tensor they leave."""
        for active in self._on_at(place):
            details["tensor"] = self._visit(active, place, **details).tensor
        tensor: Tensor | None = details.get("tensor")
        return tensor

    def visit(self, place: Place, **details: Any) -> None:
        """Fire where there is no tensor that faults could replace."""
        self.fire(place, **details)

    def visit_sample(self, sample: int) -> None:
        """Fire while one window of the data is read."""
        self.fire(Place.SAMPLE, sample=sample)

    def visit_worker(self) -> None:
        """Let faults act where a worker process puts a batch together."""
        for active in self._faults:
            active.plan.fault.act_in_worker()

    def inject_into(self, module: Any) -> None:
        """Make forward, backward and local gradient of a module places where faults act.

        Replacing `forward` itself puts the delay inside all hooks that an observer may have
        registered, in whatever order: it sees what it would see if the computation were slow. A
        hook on the output acts inside the backward of the same microbatch, whatever runs it.
        """
        if not self._faults:
            return
        original = module.forward
        has_backward, has_gradient = self._has(Place.BACKWARD), self._has(Place.BEFORE_REDUCE)
        gradients = _LocalGradients(self)

        def forward(*inputs: Any) -> Any:
            started = time.perf_counter()
            computed = original(*inputs)
            self._forward_seconds.append(time.perf_counter() - started)
            outputs: Any = self.fire(Place.FORWARD, tensor=computed)
            if getattr(outputs, "requires_grad", False):
                if has_backward:
                    outputs.register_hook(
                        lambda gradient: self.fire(Place.BACKWARD, tensor=gradient)
                    )
                if has_gradient:
                    gradients.watch(module)
            return outputs

        module.forward = forward

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
            if active.plan.fault.acts_at(place) and active.plan.covers(self.step):
                yield active

    def _context(self, active: _Active, place: Place, **details: Any) -> FaultContext:
        plan = active.plan
        return FaultContext(
            rank=self._rank,
            world_size=self._world_size,
            step=self.step,
            magnitude=plan.size,
            compute_seconds=self._compute_seconds(),
            place=place,
            visits=self._visits if place in PLACES_OF_MICROBATCHES else 1,
            sleep=self._sleep,
            peer=plan.peer,
            trainer=self._trainer,
            facts=active.facts,
            **details,
        )

    def _visit(self, active: _Active, place: Place, **details: Any) -> FaultContext:
        plan, context = active.plan, self._context(active, place, **details)
        if plan.size is not None and plan.size.ratio is not None and not context.delay_seconds():
            return context  # nothing measured yet, in the first step: it starts with the second
        if not plan.fault.is_due(context):
            return context
        if not active.fired:
            self._manifest.write(
                fault=plan.fault.name,
                rank=self._rank,
                start_step=self.step,
                start_time_ns=time.time_ns(),
                size=None if plan.size is None else str(plan.size),
                pid=os.getpid(),
            )
        active.fired += 1
        active.last_step = self.step
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


class _LocalGradients:
    """Fires at the gradient of a module's first parameter, which is the last to be complete.

    The parameter is looked up in each forward: a sharding library puts other tensors in the place
    of the parameters while it computes.
    """

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._hooked: set[int] = set()  # parameters, by id; they live as long as the module
        self._step = self._count = 0  # gradients of this step so far

    def watch(self, module: Any) -> None:
        parameter = next(module.parameters(), None)
        if parameter is not None and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            parameter.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        self._count = self._count + 1 if self._step == self._injector.step else 1
        self._step = self._injector.step
        if self._count != self._injector.microbatches:
            return gradient
        return self._injector.fire(Place.BEFORE_REDUCE, tensor=gradient)


def _computed_modules(model: Any) -> list[Any]:
    """Return the modules whose forward the rank calls: the model's, or those that it is a list of.

    A rank that holds several pipeline stages calls each by itself.
    """
    from torch import nn

    if isinstance(model, nn.ModuleList):
        return list(model)
    return list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
