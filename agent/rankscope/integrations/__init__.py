"""Callbacks for training frameworks, which add what only the framework knows.

None is needed: steps, phases and collectives are recognised without them. Each file imports its
framework, so import the one that you use; nothing else of the agent imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from rankscope.rank.attach import start as attach
from rankscope.rank.guard import guarded


@guarded
def training_begins(framework: str, facts: Mapping[str, Any]) -> None:
    """Record, once, what a framework knows of the run: its limits, accumulation, precision."""
    context = attach.context()
    if context is not None:
        context.first_work()
        fields = {name: str(value) for name, value in facts.items() if value not in (None, "")}
        context.event(f"{framework} training", fields)


@guarded
def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers: plain ones, or tensors and arrays of one element."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Real) and not isinstance(value, bool):
            found[name] = float(value)
        elif getattr(value, "numel", lambda: 0)() == 1 or getattr(value, "size", 0) == 1:
            found[name] = float(value)
    return found
