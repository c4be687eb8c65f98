"""The step clock: which phase the main thread is in, and what each phase of a step took.

Every nanosecond of a step belongs to exactly one phase, so the phases add up to the step. Time
for which the thread was blocked on peers is kept beside the phase in which it happened.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rankscope.schema import (
    PHASES,
    STEP_CHECKPOINT,
    STEP_EVALUATION,
    STEP_FIRST,
)

if TYPE_CHECKING:
    from rankscope.recorder import Recorder

OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVALUATION = range(7)
assert PHASES[CHECKPOINT] == "checkpoint"
assert len(PHASES) == 7
_FLAG_OF_PHASE = {CHECKPOINT: STEP_CHECKPOINT, EVALUATION: STEP_EVALUATION}
_now = time.monotonic_ns


class StepClock:
    """Times the phases of the main thread's steps. Calls from other threads are ignored."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.phase = OTHER
        self.sees_data = False  # a data loader shows where the first forward begins
        self.forward_is_explicit = False  # a pipeline or the script names its forwards
        self.explicit_steps = False  # rankscope.step() was called: optimizers end no step
        self.saw_backward = False
        self.step = 1
        self._thread = threading.main_thread().ident
        self._since_ns = self._started_ns = _now()
        self._cpu_ns = time.thread_time_ns()
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self._gap_ns = 0  # time in OTHER since the last known phase: perhaps a forward
        self._gap_blocked_ns = 0
        self._blocked_seen_ns = 0  # of the recorder's total
        self._microbatches = 0
        self._flags = STEP_FIRST

    def is_ours(self) -> bool:
        """Return whether this thread's time is the step's time."""
        return threading.get_ident() == self._thread

    def enter(self, phase: int) -> int:
        """Begin a phase and return the one before, to be given back to `enter` later."""
        before = self.phase
        now = _now()
        if self.recorder is not None:
            self._take_blocked(self.recorder.thread_blocked_ns)
        elapsed = now - self._since_ns
        self._spent[before] += elapsed
        if before == OTHER:
            self._gap_ns += elapsed
        if phase == BACKWARD and before != BACKWARD:
            self._begin_backward()
        if phase != OTHER or before != OTHER:
            self._gap_ns = self._gap_blocked_ns = 0
        self._flags |= _FLAG_OF_PHASE.get(phase, 0)
        self.phase = phase
        self._since_ns = now
        if self.recorder is not None:
            self.recorder.set_phase(phase, now)
        return before

    def _begin_backward(self) -> None:
        guess = not self.forward_is_explicit and (self.saw_backward or not self.sees_data)
        self.saw_backward = True
        self._microbatches += 1
        if guess and self.phase == OTHER:  # what ran until here was a forward
            self._spent[OTHER] -= self._gap_ns
            self._spent[FORWARD] += self._gap_ns
            self._blocked[OTHER] -= self._gap_blocked_ns
            self._blocked[FORWARD] += self._gap_blocked_ns

    def _take_blocked(self, total_ns: int) -> None:
        """Count what waits have added to the recorder's total since the last look."""
        if total_ns != self._blocked_seen_ns:
            self.add_blocked(total_ns - self._blocked_seen_ns)
            self._blocked_seen_ns = total_ns

    def add_blocked(self, duration_ns: int) -> None:
        """Add time in which the thread was blocked on peers, in the phase of now."""
        self._blocked[self.phase] += duration_ns
        if self.phase == OTHER:
            self._gap_blocked_ns += duration_ns

    def optimizer_ended(self) -> None:
        """Close the step if this was the first optimizer after a backward pass."""
        if self.saw_backward and not self.explicit_steps:
            self.end_step()

    def end_step(self) -> None:
        """Close the step and begin the next one."""
        self.enter(OTHER)
        now, cpu = self._since_ns, time.thread_time_ns()
        recorder = self.recorder
        if recorder is not None and recorder.active:
            spent, blocked = self._spent, self._blocked
            recorder.step_ended((
                self._started_ns, now, *spent,
                blocked[FORWARD], blocked[BACKWARD], blocked[OPTIMIZER],
                blocked[OTHER] + blocked[DATA] + blocked[CHECKPOINT] + blocked[EVALUATION],
                cpu - self._cpu_ns, 0, 0, 0, self.step, self._microbatches,
                recorder.collectives_in_step, self._flags, 0, 0, 0, 0,
            ))  # fmt: skip
            recorder.begin_step(self.step + 1)
        self.step += 1
        self._started_ns, self._cpu_ns = now, cpu
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self._gap_ns = self._gap_blocked_ns = self._microbatches = self._flags = 0
        self.saw_backward = False

    def renumber(self, step: int) -> None:
        """Go on counting from `step`: the script resumed, or numbers its steps itself."""
        self.step = step
        if self.recorder is not None:
            self.recorder.begin_step(step)
