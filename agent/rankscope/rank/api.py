"""The public functions. Each is harmless, and nearly free, where no agent runs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from rankscope.rank.attach import start as attach
from rankscope.rank.guard import guarded
from rankscope.wire.schema import REGROUPED


def init(**settings: Any) -> None:
    """Start the agent in this process; a second call changes nothing.

    Settings are those of `rankscope.settings`, by name, over the environment's. Call it before
    init_process_group. Raises ValueError for a setting that does not exist or does not parse:
    what you ask for fails loudly.
    """
    from rankscope.settings import SETTINGS, as_text, from_environment

    known = {setting.name: setting for setting in SETTINGS}
    for name in settings:
        if name not in known:
            raise ValueError(
                f"rankscope.init: no setting {name!r}; there are: {', '.join(sorted(known))}"
            )
    variables = {known[name].variable: as_text(value) for name, value in settings.items()}
    # the same checks, whichever way a value came
    chosen = from_environment(os.environ | variables)
    os.environ.update(variables)  # the collector and later processes read them there
    attach.start(chosen)


@guarded
def step(number: int | None = None) -> None:
    """End a step here. From now on optimizers end no step; `number` names the one that ended."""
    context = attach.context()
    if context is not None and context.clock.is_ours():
        context.first_work()
        context.clock.end_explicit_step(number)
        context.step_boundary()


@guarded
def set_step(number: int) -> None:
    """Say which step comes next, for example after a resume: steps are counted from there."""
    context = attach.context()
    if context is not None:
        context.clock.renumber(int(number))


@guarded
def regrouped(epoch: int, ranks: Sequence[int], *, rank: int, world_size: int) -> None:
    """Say which ranks of the job the next default group is made of, in its order.

    For programs that train on without a rank that is lost, or with one that comes: call it on all
    members, before each `init_process_group`. `epoch` counts the groups from 1, the same on all of
    them; `rank` and `world_size` are this process's in the whole job, whatever its group is.
    """
    context = attach.context()
    if context is not None:
        context.world_known(int(rank), int(world_size))
        if context.recorder is not None:
            context.recorder.regrouped(int(epoch), [int(member) for member in ranks])
            members = ",".join(str(int(member)) for member in ranks)
            context.event(REGROUPED, {"epoch": str(int(epoch)), "ranks": members})


@guarded
def stage(number: int, count: int, *, microbatches: int = 0, schedule: str = "") -> None:
    """Say that this rank holds stage `number`, from 0, of a pipeline with `count` stages.

    For pipelines that are written by hand: those of torch.distributed.pipelining are known. Before
    the first step, once; saying the same again costs nothing. `microbatches` of a step: those that
    are in the pipeline at once; 0: as sends and receives show. Numbers that are no stage of such a
    pipeline change nothing.
    """
    context = attach.context()
    if context is not None and 0 <= int(number) < int(count):
        context.declare(
            stage=int(number),
            num_stages=int(count),
            num_local_stages=1,
            num_microbatches=max(0, int(microbatches)),
            schedule=str(schedule),
        )


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time inside as a phase: data, forward, backward, optimizer, checkpoint, ...

    Inside, nothing is guessed. Any other name changes nothing. Exceptions of the body pass
    unchanged.
    """
    before = _enter_phase(name)
    try:
        yield
    finally:
        if before is not None:
            _leave_phase(before)


@guarded
def _enter_phase(name: str) -> int | None:
    context = attach.context()
    if context is None or not context.clock.is_ours():
        return None
    from rankscope.rank.steps import FORWARD
    from rankscope.wire.schema import PHASES

    numbers: dict[str, int] = {known: number for number, known in enumerate(PHASES)}
    if name not in numbers:
        return None
    context.clock.forward_is_explicit |= numbers[name] == FORWARD
    return context.clock.enter_explicit(numbers[name])


@guarded
def _leave_phase(before: int) -> None:
    context = attach.context()
    if context is not None:
        context.clock.leave_explicit(before)


@guarded
def log_metrics(step: int, **values: float) -> None:
    """Record numbers of training for a step: loss, learning_rate, tokens, ...

    Values must be numbers or one-element tensors; a tensor on a GPU would be synchronised by
    your own float() sooner or later, so give it when you have it.
    """
    context = attach.context()
    if context is not None and context.recorder is not None:
        numbers = {name: float(value) for name, value in values.items()}
        context.metrics.given.update(numbers)
        context.record_given(int(step), numbers)


class LoggingHandler(logging.Handler):
    """Sends records to the agent of this process: `logging.getLogger().addHandler(...)`.

    With the agent's own `logging` hook installed (the default) every record is kept already and
    this handler adds nothing; with `hooks` set without it, this is how logs arrive.
    """

    def __init__(self, level: int | str = logging.NOTSET) -> None:
        super().__init__(level)
        self._capture: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record. Never raises, never logs."""
        context = attach.context()
        if context is not None and "logging" not in context.sources:
            from rankscope.rank.hooks.logs import LogCapture

            if not isinstance(self._capture, LogCapture):
                self._capture = LogCapture(context)
            self._capture.take(record)
