"""Faults in the computation of a rank: it is slow, or pauses, or shares its core."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import DelayFault, Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


# A backward costs about two forwards, so a slow processor adds twice as much to it.
SHARES = {Place.FORWARD: 1 / 3, Place.BACKWARD: 2 / 3}


class SlowCompute(Fault):  # a throttled or shared processor
    """Each forward and backward of the rank takes longer, the backward twice as much longer."""

    name = "slow_compute"
    finding = "slow_compute"
    place = Place.FORWARD
    other_place = Place.BACKWARD
    default_size = Magnitude(ratio=1.0)
    size_is = "extra time of a step"

    def fire(self, context: FaultContext) -> None:
        """Sleep for this microbatch's share of the extra time."""
        context.sleep(context.delay_seconds() * SHARES[context.place])


class SlowForward(DelayFault):  # an input that needs more work on one rank
    """Each forward of the rank takes longer, the backward does not."""

    name = "slow_forward"
    finding = "slow_compute"
    place = Place.FORWARD
    default_size = Magnitude(ratio=1.0)
    size_is = "extra time of a step"


class SlowBackward(DelayFault):  # recomputation on one rank
    """Each backward of the rank takes longer, the forward does not."""

    name = "slow_backward"
    finding = "slow_compute"
    place = Place.BACKWARD
    default_size = Magnitude(ratio=1.0)
    size_is = "extra time of a step"


class Hiccup(Fault):
    """One step in five, drawn at random, stalls once; the others are as fast as ever."""

    name = "hiccup"
    finding = "slow_compute"  # transient
    place = Place.FORWARD
    default_size = Magnitude(ratio=5.0)
    size_is = "time of one stall"
    share_of_steps = 0.2

    _last_step = 0

    def is_due(self, context: FaultContext) -> bool:
        """Only the first forward of a drawn step; the first step of the fault is drawn always."""
        drawn = random.Random(f"{context.rank} {context.step}").random() < self.share_of_steps
        is_first_visit = context.step != self._last_step
        return is_first_visit and (drawn or not self._last_step)

    def fire(self, context: FaultContext) -> None:
        """Sleep once for all of the extra time."""
        self._last_step = context.step
        seconds = context.delay_seconds() * context.visits
        context.add(stalled_seconds=seconds)
        context.sleep(seconds)


class _Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


class GcPause(Fault):
    """In every third step the rank leaves so many dead cycles behind, and collects them."""

    name = "gc_pause"
    finding = "garbage_collection"
    place = Place.FORWARD
    default_size = Magnitude(count=300_000)
    size_is = "objects collected at once"
    steps_between = 3

    _last_step = -steps_between

    def is_due(self, context: FaultContext) -> bool:
        """Only the first forward of every third step."""
        return context.step - self._last_step >= self.steps_between

    def fire(self, context: FaultContext) -> None:
        """Make the garbage while the collector is off, then let it collect."""
        self._last_step = context.step
        was_enabled = gc.isenabled()
        gc.disable()
        for _ in range(int(context.size())):
            _Node()
        started = time.perf_counter()
        collected = gc.collect()
        context.add(paused_seconds=time.perf_counter() - started, collected=collected)
        if was_enabled:
            gc.enable()


# Computes until the rank is gone; without site-packages, so that nothing watches it.
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


class Contention(Fault):
    """Busy processes run on the same core as the rank's training thread.

    That thread keeps to its core from the first step on, as launchers bind ranks: a rank that lost
    its other cores when it became slow would be slow because of that.
    """

    name = "contention"
    finding = "host_contention"
    place = Place.STEP
    default_size = Magnitude(count=2)
    size_is = "busy processes"

    def check(self, settings: Settings, world_size: int) -> None:
        """Only some systems let a thread be pinned."""
        if not hasattr(os, "sched_setaffinity"):
            problem = "contention needs a system with sched_setaffinity, such as Linux"
            raise SettingError("fault", problem, "Leave it out here")

    def prepare(self, rank: int) -> None:
        """Pin this thread to one core."""
        cores = sorted(os.sched_getaffinity(0))
        self._core = cores[rank % len(cores)]
        os.sched_setaffinity(0, {self._core})

    def begin(self, context: FaultContext) -> None:
        """Start the busy processes."""
        command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
        # They inherit the core of the thread that starts them.
        self._busy = [subprocess.Popen(command) for _ in range(int(context.size()))]
        context.add(core=self._core)

    def end(self, context: FaultContext) -> None:
        """End the busy processes."""
        for process in self._busy:
            process.kill()
            process.wait()
