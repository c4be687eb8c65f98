"""The public functions. Each is harmless, and nearly free, where no agent runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from rankscope.rank.attach import start as attach
from rankscope.rank.guard import guarded


def init(**settings: Any) -> None:
    """Start the agent in this process; a second call changes nothing.

    Settings are those of `rankscope.settings`, by name, over the environment's. Call it before
    init_process_group. Raises ValueError for a setting that does not exist or does not parse:
    what you ask for fails loudly.
    """
    from rankscope.settings import SETTINGS, from_environment, to_environment

    known = {setting.name for setting in SETTINGS}
    for name in settings:
        if name not in known:
            raise ValueError(
                f"rankscope.init: no setting {name!r}; there are: {', '.join(sorted(known))}"
            )
    chosen = from_environment(os.environ)
    changed = dataclasses.replace(chosen, **settings)
    variables = to_environment(changed)
    from_environment(variables)  # the same checks, whichever way a value came
    os.environ.update(variables)  # the collector and later processes read them there
    attach.start(changed)


@guarded
def step(number: int | None = None) -> None:
    """End a step here. From now on optimizers end no step; `number` names the one that ended."""
    agent = attach.agent()
    if agent is None:
        return
    clock = agent.clock
    if clock.is_ours():
        agent.first_work()
        clock.end_explicit_step(number)
        agent.step_boundary()


@guarded
def set_step(number: int) -> None:
    """Say which step comes next, for example after a resume: steps are counted from there."""
    agent = attach.agent()
    if agent is not None:
        agent.clock.renumber(int(number))


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
    agent = attach.agent()
    if agent is None or not agent.clock.is_ours():
        return None
    from rankscope.rank.steps import FORWARD
    from rankscope.wire.schema import PHASES

    numbers: dict[str, int] = {known: number for number, known in enumerate(PHASES)}
    if name not in numbers:
        return None
    agent.clock.forward_is_explicit |= numbers[name] == FORWARD
    return agent.clock.enter_explicit(numbers[name])


@guarded
def _leave_phase(before: int) -> None:
    agent = attach.agent()
    if agent is not None:
        agent.clock.leave_explicit(before)


@guarded
def log_metrics(step: int, **values: float) -> None:
    """Record numbers of training for a step: loss, learning_rate, tokens, ...

    Values must be numbers or one-element tensors; a tensor on a GPU would be synchronised by
    your own float() sooner or later, so give it when you have it.
    """
    agent = attach.agent()
    if agent is None or agent.recorder is None:
        return
    from rankscope.wire.schema import Metrics

    numbers = {name: float(value) for name, value in values.items()}
    agent.sheet.given.update(numbers)
    counted = agent.recorder.step
    agent.recorder.record(
        Metrics(**agent.here(), step=int(step), values=numbers, counted_step=counted)
    )
