"""One operation of a rank, counts of them, and the steps of a run in which they occur."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeAlias

from rankscope_trainer.settings import Settings

STARTUP = 0  # the time before the first step, where a step is asked for
INT32_BYTES, INT64_BYTES, FLOAT32_BYTES = 4, 8, 4
MIB = 1 << 20


class Message(NamedTuple):
    """One operation of a rank: its name and the bytes that it sends or receives."""

    operation: str
    num_bytes: int


Traffic: TypeAlias = Counter[Message]  # how often each message occurs
NOTHING = Traffic()


def each_step(
    settings: Settings,
    resumed_after: int,
    training: Traffic,
    *,
    startup: Traffic = NOTHING,
    validation: Traffic = NOTHING,
    saving: Traffic = NOTHING,
    vote: Traffic = NOTHING,
) -> dict[int, Traffic]:
    """Return the same training for each step, and what else it sends where that is due.

    `validation` is one batch of it, `saving` a checkpoint, and `vote` occurs before the first step
    and at each change between training and validation.
    """
    by_step = {STARTUP: Traffic(startup)}
    must_vote = True
    for step in range(resumed_after + 1, settings.steps + 1):
        by_step[step] = training + vote if must_vote else Traffic(training)
        must_vote = is_validated(settings, step)
        if must_vote:
            by_step[step] += vote
            for _ in range(settings.validate_batches):
                by_step[step] += validation
        if is_saved(settings, step):
            by_step[step] += saving
    return by_step


def is_validated(settings: Settings, step: int) -> bool:
    """Return whether a validation follows the step."""
    return bool(settings.validate_every) and step % settings.validate_every == 0


def is_saved(settings: Settings, step: int) -> bool:
    """Return whether a checkpoint follows the step."""
    return bool(settings.checkpoint_dir) and step % settings.checkpoint_every == 0
