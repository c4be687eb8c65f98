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
from typing import NamedTuple

from rankscope.native.hotpath import ClockCore
from rankscope.native.hotpath.clock import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
)
from rankscope.rank.recorder import Recorder
from rankscope.wire.schema import STEP_EVALUATION, STEP_FIRST

__all__ = [
    "BACKWARD", "CHECKPOINT", "DATA", "EVALUATION", "FORWARD", "OPTIMIZER", "OTHER", "EndedStep",
    "Mark", "StepClock",
]  # fmt: skip

_TAKES_OVER = 8  # backward passes of one thread while the one that trained before made none
_NO_OPTIMIZER_AFTER = 256  # backward passes; then each of them is taken for a step
_UNKNOWN = -1  # number of collectives of a step that was not recorded
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
    """Where the clock was at some moment, to say later what the time since then was."""

    step: int
    num_backwards: int
    spent: tuple[int, ...]
    blocked: tuple[int, ...]
    gap_ns: int
    gap_blocked_ns: int


class StepClock(ClockCore):
    """Times the phases of the steps of the thread that trains. Calls from others are ignored.

    It is the main thread, until another one trains in its place: Ray Train, servers and notebooks
    run the loop in a thread of their own. What every step goes through is in `ClockCore`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_end: Callable[[EndedStep], None] = lambda ended: None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know of no step yet: in a new process, or in a fork, which is perhaps a rank itself."""
        self.recorder = None
        self.on_phase = None
        self.phase = OTHER
        self.sees_data = False
        self.forward_is_explicit = False
        self.explicit_steps = False  # rankscope.step() was called: optimizers end no step
        self.saw_optimizer = False  # ever
        self.skipped = False  # a gradient scaler kept the optimizer from stepping
        self.num_backwards = 0
        self.step = 1
        self.explicit = 0
        main = threading.main_thread().ident
        assert main is not None
        self.thread, self.native_id = main, os.getpid()
        # backward passes of other threads since the last of its own
        self._others, self._others_since = _TAKES_OVER, 0
        self.since_ns, self.blocked_seen_ns = _now(), 0
        self.restart()
        self.flags = STEP_FIRST

    @property
    def recorder(self) -> Recorder | None:
        """Where steps are written; None: nowhere."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        if recorder is None:
            self.detach()
        else:
            self.attach(*recorder.rings)

    def trains(self) -> bool:
        """Return whether a backward pass that begins in this thread is one of the steps'.

        The first thread that makes one has the steps; another takes them over where that one has
        ended or makes no more. Inside a pass the autograd engine's threads begin others.
        """
        if self.is_ours():
            return True
        if self.num_backwards != self._others_since:
            self._others_since, self._others = self.num_backwards, 0
        self._others += 1
        has_ended = all(thread.ident != self.thread for thread in threading.enumerate())
        if not has_ended and (self._others <= _TAKES_OVER or self.phase == BACKWARD):
            return False
        self._others = 0
        self.account()
        self.thread, self.native_id = _get_ident(), threading.get_native_id()
        self.phase = OTHER
        self.take_counters()
        self.flags |= STEP_FIRST
        if self._recorder is not None:
            self._recorder.set_training_thread(self.native_id)
        return True

    # --- phases ------------------------------------------------------------------------------

    def enter_explicit(self, phase: int) -> int:
        """Begin a phase that the script names: until its end the hooks change nothing."""
        before = self.phase
        self.switch(phase)
        self.explicit += 1
        return before

    def leave_explicit(self, before: int) -> None:
        """End a phase that the script named."""
        self.explicit -= 1
        self.switch(before)

    # --- what turns out later ----------------------------------------------------------------

    def mark(self) -> Mark:
        """Return where the clock is now."""
        self.account()
        return Mark(
            self.step, self.num_backwards, self.spent(), self.blocked(),
            self.gap_ns, self.gap_blocked_ns,
        )  # fmt: skip

    def was_evaluation(self, mark: Mark, least_ns: int = 0) -> bool:
        """Count the time since `mark` as evaluation, if no backward pass ran and no step ended.

        Less than `least_ns` beside waiting for data is no evaluation: nothing was computed.
        """
        if mark.step != self.step or mark.num_backwards != self.num_backwards or self.explicit:
            return False
        self.account()
        spent = [now - then for now, then in zip(self.spent(), mark.spent, strict=True)]
        blocked = [now - then for now, then in zip(self.blocked(), mark.blocked, strict=True)]
        if sum(spent[phase] for phase in (OTHER, FORWARD, EVALUATION)) < least_ns:
            return False
        for phase in (OTHER, DATA, FORWARD):
            self.move(phase, EVALUATION, spent[phase], blocked[phase])
        self.gap_ns, self.gap_blocked_ns = mark.gap_ns, mark.gap_blocked_ns
        self.flags |= STEP_EVALUATION
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
                self.flags |= flag
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
        self.switch(self.phase if self.explicit else OTHER)
        recorder = self._recorder
        if recorder is not None and recorder.active:
            ended = self.close(recorder.collectives_in_step, recorder.step_flags)
            recorder.begin_step(self.step)
        else:
            ended = self.close(_UNKNOWN, 0)
        self.on_end(EndedStep._make(ended))

    def resume(self, recorder: Recorder) -> None:
        """Begin a step here, after a time in which nothing was recorded."""
        self.phase = OTHER
        self.account()
        self.restart()
        self.recorder = recorder
        self.blocked_seen_ns = recorder.thread_blocked_ns
        recorder.begin_step(self.step)

    @property
    def last_step(self) -> int:
        """The last step that ended, or the one of now if something was learnt in it."""
        has_begun = self.saw_backward or self.flags & STEP_FIRST
        return self.step if has_begun else self.step - 1

    def renumber(self, step: int) -> None:
        """Go on counting from `step`: the script resumed, or numbers its steps itself."""
        self.step = step
        if self._recorder is not None:
            self._recorder.begin_step(step)
