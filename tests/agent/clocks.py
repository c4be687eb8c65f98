"""Step clocks of both cores, on real rings, whose phases last whole seconds in no time."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any
from unittest import mock

from rankscope.files import ring
from rankscope.native import hotpath
from rankscope.native.hotpath.clock import ClockCore

SECOND = 1_000_000_000
CORES: dict[str, type[Any]] = {"python": ClockCore, "native": hotpath.ClockCore}


def step_clock(core: str) -> Any:
    """Return a `StepClock` on the core of this name."""
    spec = importlib.util.find_spec("rankscope.rank.steps")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(hotpath, "ClockCore", CORES[core]):
        spec.loader.exec_module(module)
    return module.StepClock()


def ring_in(folder: Path, name: str, slot_bytes: int) -> ring.RingWriter:
    """Return a new ring in a file of this name."""
    return ring.RingWriter(
        folder / name, slot_bytes, 1024, attempt=0, rank=0, world_size=2, local_rank=0
    )


def rings_in(folder: Path) -> tuple[ring.RingWriter, ring.RingWriter]:
    """Return those that a clock writes into: of collectives, and of steps."""
    return (
        ring_in(folder, "collectives", ring.COLLECTIVE_SLOT.size),
        ring_in(folder, "steps", ring.STEP_SLOT.size),
    )


def pass_time(clock: Any, num_seconds: int) -> None:
    """Let the phase of now, and with it its step, have begun so much earlier than just now."""
    moved = time.monotonic_ns() - num_seconds * SECOND - clock.since_ns
    clock.since_ns += moved
    clock.started_ns += moved


def seconds(value: Any) -> Any:
    """Return times in whole seconds: a machine that is busy for a moment changes nothing."""
    if isinstance(value, tuple):
        return tuple(seconds(one) for one in value)
    return round(value / SECOND)
