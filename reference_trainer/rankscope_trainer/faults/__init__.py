"""Faults that can be injected: a module for each place where they act.

A fault acts on the real thing (a slow forward, a slow data loader, a rank that never arrives)
and never on the instruments that are to find it. A class with a name of its own is in FAULTS.
"""

from __future__ import annotations

from types import ModuleType

from rankscope_trainer.faults import (
    checkpoints,
    clocks,
    collectives,
    compute,
    data,
    environment,
    layout,
    links,
    memory,
    numbers,
    processes,
)
from rankscope_trainer.faults.fault import Fault


def _faults_of(module: ModuleType) -> tuple[Fault, ...]:
    """Return the faults that a module defines, in the order in which they stand there."""
    return tuple(
        value()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Fault)
        and value.__module__ == module.__name__
        and "name" in vars(value)
    )


FAULTS: tuple[Fault, ...] = (
    *_faults_of(compute),
    *_faults_of(data),
    *_faults_of(memory),
    *_faults_of(processes),
    *_faults_of(collectives),
    *_faults_of(links),
    *_faults_of(numbers),
    *_faults_of(checkpoints),
    *_faults_of(environment),
    *_faults_of(clocks),
    *_faults_of(layout),
)
