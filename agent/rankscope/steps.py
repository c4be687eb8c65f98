"""The step clock: which phase the training thread is in, and what each phase of a step took.

Every nanosecond of a step belongs to exactly one phase, so the phases add up to the step. Time
for which the thread was blocked on peers is kept beside the phase in which it happened.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING, NamedTuple

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
assert len(PHASES) == 7  # those from CHECKPOINT on leave a flag
_FLAG_OF_PHASE = {CHECKPOINT: STEP_CHECKPOINT, EVALUATION: STEP_EVALUATION}
_TAKES_OVER = 8  # backward passes of one thread while the one that trained before made none
_NO_OPTIMIZER_AFTER = 256  # backward passes; then each of them is taken for a step
_U32 = (1 << 32) - 1
_now = time.monotonic_ns
_get_ident = threading.get_ident


class EndedStep(NamedTuple):
    """What others need to know of the step that just ended."""

    step: int
    duration_ns: int
    microbatches: int
    flags: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the clock stood at some moment, to say later what the time since then was."""

    step: int
    num_backwards: int
    spent: tuple[int, ...]
    blocked: tuple[int, ...]
    gap_ns: int
    gap_blocked_ns: int


class StepClock:
    """Times the phases of the steps of the thread that trains. Calls from others are ignored.

    It is the main thread, until another one trains in its place: Ray Train, servers and notebooks
    run the loop in a thread of their own.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[EndedStep], None] = lambda ended: None
        self.on_phase: Callable[[int], None] | None = None  # told the phase that ends
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know of no step yet: in a new process, or in a fork, which is perhaps a rank itself."""
        self.recorder: Recorder | None = None
        self.phase = OTHER
        self.sees_data = False  # a data loader shows where the first forward begins
        self.forward_is_explicit = False  # a pipeline or the script names its forwards
        self.explicit_steps = False  # rankscope.step() was called: optimizers end no step
        self.saw_backward = False  # in this step
        self.saw_optimizer = False  # ever
        self.skipped = False  # a gradient scaler kept the optimizer from stepping
        self.num_backwards = 0  # ever
        self.step = 1
        self.gc_ns = 0  # of this step; hooks add to it
        self.copy_ns = 0  # of this step; hooks add to it
        self._explicit = 0  # depth of rankscope.phase() blocks
        main = threading.main_thread().ident
        assert main is not None
        self.thread, self.native_id = main, os.getpid()
        self._others = _TAKES_OVER  # backward passes of other threads since the last of its own
        self._since_ns = self._started_ns = _now()
        self._counters = _counters()
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self._gap_ns = 0  # time in OTHER since the last known phase: perhaps a forward
        self._gap_blocked_ns = 0
        self._blocked_seen_ns = 0  # of the recorder's total
        self._past_first = False  # a backward pass of this step has begun
        self._microbatches = 0
        self._flags = STEP_FIRST

    def is_ours(self) -> bool:
        """Return whether this thread's time is the step's time."""
        return _get_ident() == self.thread

    def trains(self) -> bool:
        """Return whether a backward pass that begins in this thread is one of the steps'.

        The first thread that makes one has the steps; another takes them over where that one has
        ended or makes none any more. Inside a pass the autograd engine's threads begin others.
        """
        if _get_ident() == self.thread:
            self._others = 0
            return True
        self._others += 1
        has_ended = all(thread.ident != self.thread for thread in threading.enumerate())
        if not has_ended and (self._others <= _TAKES_OVER or self.phase == BACKWARD):
            return False
        self._others = 0
        self._account()
        self.thread, self.native_id = _get_ident(), threading.get_native_id()
        self.phase = OTHER
        self._counters = _counters()
        self._flags |= STEP_FIRST
        if self.recorder is not None:
            self.recorder.set_training_thread(self.native_id)
        return True

    # --- phases ------------------------------------------------------------------------------

    def enter(self, phase: int, *, counts: bool = True) -> int:
        """Begin a phase and return the one before, to be given back to `enter` later.

        Inside a phase that the script named itself nothing changes. A backward pass that does
        not `count` is no microbatch.
        """
        before = self.phase
        if phase == BACKWARD and (before != BACKWARD or self._explicit):
            self.saw_backward = True
            self.num_backwards += counts
            self._microbatches += counts
        if not self._explicit:
            self._switch(phase)
        return before

    def enter_explicit(self, phase: int) -> int:
        """Begin a phase that the script names: until its end the hooks change nothing."""
        before = self.phase
        self._switch(phase)
        self._explicit += 1
        return before

    def leave_explicit(self, before: int) -> None:
        """End a phase that the script named."""
        self._explicit -= 1
        self._switch(before)

    def _switch(self, phase: int) -> None:
        if _get_ident() != self.thread:  # taken over meanwhile
            return
        before = self.phase
        begins_backward = phase == BACKWARD and before != BACKWARD
        was_forward = begins_backward and before == OTHER and self._gap_is_forward()
        if self.on_phase is not None and phase != before:
            self.on_phase(FORWARD if was_forward else before)
        self._account()
        if was_forward:
            self._spent[OTHER] -= self._gap_ns
            self._spent[FORWARD] += self._gap_ns
            self._blocked[OTHER] -= self._gap_blocked_ns
            self._blocked[FORWARD] += self._gap_blocked_ns
        if begins_backward:
            self._past_first = True
        if phase != OTHER or before != OTHER:
            self._gap_ns = self._gap_blocked_ns = 0
        if phase >= CHECKPOINT:
            self._flags |= _FLAG_OF_PHASE[phase]
        self.phase = phase
        if self.recorder is not None:
            self.recorder.set_phase(phase, self._since_ns)

    def _account(self) -> None:
        """Give the time until now to the phase of now."""
        now = _now()
        if self.recorder is not None:
            blocked_ns = self.recorder.thread_blocked_ns
            if blocked_ns != self._blocked_seen_ns:
                self.add_blocked(blocked_ns - self._blocked_seen_ns)
                self._blocked_seen_ns = blocked_ns
        elapsed = now - self._since_ns
        self._spent[self.phase] += elapsed
        if self.phase == OTHER:
            self._gap_ns += elapsed
        self._since_ns = now

    def _gap_is_forward(self) -> bool:
        """Return whether what ran until a backward pass was its forward.

        With a data loader the first forward of a step begins at its batch; later microbatches
        may come from the same batch.
        """
        return not self.forward_is_explicit and (self._past_first or not self.sees_data)

    def add_blocked(self, duration_ns: int) -> None:
        """Add time in which the thread was blocked on peers, in the phase of now."""
        self._blocked[self.phase] += duration_ns
        if self.phase == OTHER:
            self._gap_blocked_ns += duration_ns

    # --- what turns out later ----------------------------------------------------------------

    def mark(self) -> Mark:
        """Return where the clock stands now."""
        self._account()
        return Mark(
            self.step, self.num_backwards, tuple(self._spent), tuple(self._blocked),
            self._gap_ns, self._gap_blocked_ns,
        )  # fmt: skip

    def was_evaluation(self, mark: Mark, least_ns: int = 0) -> bool:
        """Count the time since `mark` as evaluation, if no backward pass ran and no step ended.

        Less than `least_ns` beside waiting for data is no evaluation: nothing was computed.
        """
        if mark.step != self.step or mark.num_backwards != self.num_backwards or self._explicit:
            return False
        self._account()
        spent, blocked = self._spent, self._blocked
        computed = sum(spent[p] - mark.spent[p] for p in (OTHER, FORWARD, EVALUATION))
        if computed < least_ns:
            return False
        for phase in (OTHER, DATA, FORWARD):
            for now, then in ((spent, mark.spent), (blocked, mark.blocked)):
                moved = now[phase] - then[phase]
                now[phase] -= moved
                now[EVALUATION] += moved
        self._gap_ns, self._gap_blocked_ns = mark.gap_ns, mark.gap_blocked_ns
        self._flags |= STEP_EVALUATION
        return True

    # --- steps -------------------------------------------------------------------------------

    def optimizers_ended(self) -> None:
        """Close the step: the optimizers that make one together have stepped."""
        self.saw_optimizer = True
        self.skipped = False
        if self.saw_backward and not self.explicit_steps:
            self.end_step()

    def optimizer_skipped(self, flag: int) -> None:
        """Close a step whose optimizer was kept from stepping."""
        if self.skipped:
            self.skipped = False
            if self.saw_backward and not self.explicit_steps:
                self._flags |= flag
                self.end_step()

    def backward_ended(self) -> bool:
        """Close the step if no optimizer of torch is in use; return whether that is the rule.

        A script that updates its parameters itself shows nothing else that repeats.
        """
        if self.saw_optimizer or self.skipped or self.explicit_steps:
            return False
        if self.num_backwards < _NO_OPTIMIZER_AFTER:
            return False
        if self.num_backwards == _NO_OPTIMIZER_AFTER:
            self.step += self.num_backwards - 1  # steps are numbered as if each had been seen
        return True

    def end_explicit_step(self, number: int | None) -> None:
        """Close the step where the script says so; from now on optimizers close none."""
        has_trained = self.saw_optimizer and self.num_backwards  # else no optimizer closes a step
        is_closed = not self.explicit_steps and has_trained and not self.saw_backward
        self.explicit_steps = True
        if is_closed:  # by the optimizer, before the script had said anything
            self.renumber(self.step if number is None else number + 1)
            return
        if number is not None and number != self.step:
            self.renumber(number)
        self.end_step()

    def end_step(self) -> None:
        """Close the step and begin the next one."""
        self._switch(self.phase if self._explicit else OTHER)
        ended = EndedStep(
            self.step, self._since_ns - self._started_ns, self._microbatches, self._flags
        )
        counters = _counters()
        self._write(counters)
        self.step += 1
        self._begin(counters)
        self.on_end(ended)

    def _begin(self, counters: tuple[int, ...]) -> None:
        """Forget the step before; this one begins at the last change of phase."""
        self._started_ns = self._since_ns
        self._counters = counters
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self._gap_ns = self._gap_blocked_ns = self._microbatches = self._flags = 0
        self.gc_ns = self.copy_ns = 0
        self.saw_backward = self._past_first = False

    def _write(self, counters: tuple[int, ...]) -> None:
        recorder = self.recorder
        if recorder is None or not recorder.active:
            return
        spent, blocked = self._spent, self._blocked
        before = self._counters
        recorder.step_ended((
            self._started_ns, self._since_ns, *spent,
            blocked[FORWARD], blocked[BACKWARD], blocked[OPTIMIZER],
            blocked[OTHER] + blocked[DATA] + blocked[CHECKPOINT] + blocked[EVALUATION],
            counters[0] - before[0], counters[1] - before[1], self.gc_ns, self.copy_ns,
            self.step, self._microbatches, recorder.collectives_in_step,
            self._flags | recorder.step_flags,
            counters[2] - before[2] & _U32, counters[3] - before[3] & _U32,
            counters[4] - before[4] & _U32, counters[5] - before[5] & _U32,
        ))  # fmt: skip
        recorder.begin_step(self.step + 1)

    def resume(self, recorder: Recorder) -> None:
        """Begin a step here, after a time in which nothing was recorded."""
        self.phase = OTHER
        self._account()
        self._begin(_counters())
        self.recorder = recorder
        self._blocked_seen_ns = recorder.thread_blocked_ns
        recorder.begin_step(self.step)

    @property
    def last_step(self) -> int:
        """The last step that ended, or the one of now if something was learnt in it."""
        has_begun = self.saw_backward or self._flags & STEP_FIRST
        return self.step if has_begun else self.step - 1

    def renumber(self, step: int) -> None:
        """Go on counting from `step`: the script resumed, or numbers its steps itself."""
        self.step = step
        if self.recorder is not None:
            self.recorder.begin_step(step)


def _counters() -> tuple[int, ...]:
    """Return CPU ns of this thread and of the process, then this thread's faults and switches."""
    usage = getrusage(RUSAGE_THREAD)
    return (
        time.thread_time_ns(), time.process_time_ns(),
        usage.ru_minflt, usage.ru_majflt, usage.ru_nvcsw, usage.ru_nivcsw,
    )  # fmt: skip
