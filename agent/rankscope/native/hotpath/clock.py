"""The part of the step clock that every step goes through, in Python; `hotpath.cpp` is its twin.

State is plain attributes of the same names in both, so that what is rare is written once, in
`rankscope.rank.steps`, for either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from resource import RUSAGE_THREAD, getrusage

from rankscope.files import ring
from rankscope.files.ring import RingWriter
from rankscope.wire.schema import PHASES, STEP_CHECKPOINT, STEP_EVALUATION

OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVALUATION = range(7)
assert PHASES[CHECKPOINT] == "checkpoint"
assert len(PHASES) == 7  # those from CHECKPOINT on leave a flag
FLAG_OF_PHASE = {CHECKPOINT: STEP_CHECKPOINT, EVALUATION: STEP_EVALUATION}
RENEW_CLOCK_NS = 100_000_000  # the two clocks of a host drift apart by microseconds in a second
_U32 = (1 << 32) - 1
_HEAD, _HEARTBEAT = ring.HEAD_AT // 8, ring.HEARTBEAT_AT // 8
_PHASE_SINCE, _THREAD_BLOCKED = ring.PHASE_SINCE_AT // 8, ring.BLOCKED_AT // 8
_pack_step = ring.STEP_SLOT.pack_into
_now = time.monotonic_ns
_get_ident = threading.get_ident


class ClockCore:
    """Gives each nanosecond of one thread to a phase, and writes a slot for each step."""

    # of the step in progress unless something else is said
    phase: int
    step: int  # its number
    thread: int  # identity of the one whose time it is
    microbatches: int
    flags: int
    explicit: int  # depth of phases that the script named itself: inside, hooks change nothing
    num_backwards: int  # ever
    saw_backward: bool
    past_first: bool  # a backward pass has begun
    sees_data: bool  # a data loader shows where the first forward begins
    forward_is_explicit: bool  # a pipeline or the script names its forwards
    since_ns: int  # of the phase of now
    started_ns: int
    gap_ns: int  # time in OTHER since the last known phase: perhaps a forward
    gap_blocked_ns: int
    blocked_seen_ns: int  # of the ring's total
    gc_ns: int  # hooks add to these two
    copy_ns: int
    on_phase: Callable[[int], None] | None  # hears of the phase that ends

    def __init__(self) -> None:
        self._rings: tuple[RingWriter, RingWriter] | None = None
        self._clock_due_ns = 0
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self._counters = _counters()

    def attach(self, collectives: RingWriter, steps: RingWriter) -> None:
        """Write to these rings from now on: phases into the first, steps into the second."""
        self._rings = collectives, steps

    def detach(self) -> None:
        """Stop writing."""
        self._rings = None

    # --- phases ------------------------------------------------------------------------------

    def is_ours(self) -> bool:
        """Return whether this thread's time is the step's time."""
        return _get_ident() == self.thread

    def enter(self, phase: int, counts: bool = True) -> int:
        """Begin a phase and return the one before, to be given back to `enter` later.

        Inside a phase that the script named itself nothing changes. A backward pass that does
        not `count` is no microbatch.
        """
        before = self.phase
        if phase == BACKWARD and (before != BACKWARD or self.explicit):
            self.saw_backward = True
            self.num_backwards += counts
            self.microbatches += counts
        if not self.explicit:
            self.switch(phase)
        return before

    def switch(self, phase: int) -> None:
        """Begin a phase, inside one that the script named as well."""
        if _get_ident() != self.thread:  # taken over meanwhile
            return
        before = self.phase
        begins_backward = phase == BACKWARD and before != BACKWARD
        was_forward = begins_backward and before == OTHER and self._gap_is_forward()
        if self.on_phase is not None and phase != before:
            self.on_phase(FORWARD if was_forward else before)
        self.account()
        if was_forward:
            self.move(OTHER, FORWARD, self.gap_ns, self.gap_blocked_ns)
        if begins_backward:
            self.past_first = True
        if phase != OTHER or before != OTHER:
            self.gap_ns = self.gap_blocked_ns = 0
        self.flags |= FLAG_OF_PHASE.get(phase, 0)
        self.phase = phase
        if self._rings is not None:
            header = self._rings[0]
            header.words[_PHASE_SINCE] = header.words[_HEARTBEAT] = self.since_ns
            header.buffer[ring.PHASE_AT] = phase

    def _gap_is_forward(self) -> bool:
        """Return whether what ran until a backward pass was its forward.

        With a data loader the first forward of a step begins at its batch; later microbatches
        may come from the same batch.
        """
        return not self.forward_is_explicit and (self.past_first or not self.sees_data)

    def account(self) -> None:
        """Give the time until now to the phase of now."""
        now = _now()
        if self._rings is not None:
            blocked_ns = self._rings[0].words[_THREAD_BLOCKED]
            if blocked_ns != self.blocked_seen_ns:
                self.add_blocked(blocked_ns - self.blocked_seen_ns)
                self.blocked_seen_ns = blocked_ns
        elapsed = now - self.since_ns
        self._spent[self.phase] += elapsed
        if self.phase == OTHER:
            self.gap_ns += elapsed
        self.since_ns = now

    def add_blocked(self, duration_ns: int) -> None:
        """Add time in which the thread was blocked on peers, in the phase of now."""
        self._blocked[self.phase] += duration_ns
        if self.phase == OTHER:
            self.gap_blocked_ns += duration_ns

    def spent(self) -> tuple[int, ...]:
        """Return the ns of the step in each phase, by its number."""
        return tuple(self._spent)

    def blocked(self) -> tuple[int, ...]:
        """Return the ns of them for which the thread was blocked."""
        return tuple(self._blocked)

    def move(self, source: int, target: int, spent_ns: int, blocked_ns: int) -> None:
        """Count time of one phase as another's: that is what it was."""
        self._spent[source] -= spent_ns
        self._spent[target] += spent_ns
        self._blocked[source] -= blocked_ns
        self._blocked[target] += blocked_ns

    # --- steps -------------------------------------------------------------------------------

    def take_counters(self) -> None:
        """Count CPU time, faults and switches of this step from here."""
        self._counters = _counters()

    def close(self, num_collectives: int, flags: int) -> tuple[int, int, int, int]:
        """End the step at the last change of phase; return its number, ns, microbatches, flags.

        It is written with so many collectives and these flags added where a ring is attached,
        not where the number is negative, which means unknown.
        """
        counters = _counters()
        ended = self.step, self.since_ns - self.started_ns, self.microbatches, self.flags
        if self._rings is not None and num_collectives >= 0:
            self._write(self._rings, counters, num_collectives, flags)
        self.step += 1
        self._counters = counters
        self._begin()
        return ended

    def restart(self) -> None:
        """Forget the step so far: it begins at the last change of phase."""
        self._counters = _counters()
        self._begin()

    def _begin(self) -> None:
        self.started_ns = self.since_ns
        self._spent = [0] * len(PHASES)
        self._blocked = [0] * len(PHASES)
        self.gap_ns = self.gap_blocked_ns = self.microbatches = self.flags = 0
        self.gc_ns = self.copy_ns = 0
        self.saw_backward = self.past_first = False

    def _write(
        self, rings: tuple[RingWriter, RingWriter], counters: tuple[int, ...], num: int, flags: int
    ) -> None:
        header, steps = rings
        blocked, before, words = self._blocked, self._counters, steps.words
        number = words[_HEAD]
        at = steps.offset(number)
        words[at >> 3] = 0
        _pack_step(
            steps.buffer, at, 0, self.started_ns, self.since_ns, *self._spent,
            blocked[FORWARD], blocked[BACKWARD], blocked[OPTIMIZER],
            blocked[OTHER] + blocked[DATA] + blocked[CHECKPOINT] + blocked[EVALUATION],
            counters[0] - before[0], counters[1] - before[1], self.gc_ns, self.copy_ns,
            self.step, self.microbatches, num, self.flags | flags,
            *(new - old & _U32 for new, old in zip(counters[2:], before[2:], strict=True)),
        )  # fmt: skip
        words[at >> 3] = words[_HEAD] = number + 1
        if self.since_ns > self._clock_due_ns:
            self._clock_due_ns = self.since_ns + RENEW_CLOCK_NS
            header.renew_clock()
            steps.renew_clock()


def _counters() -> tuple[int, ...]:
    """Return CPU ns of this thread and of the process, then this thread's faults and switches."""
    usage = getrusage(RUSAGE_THREAD)
    return (
        time.thread_time_ns(), time.process_time_ns(),
        usage.ru_minflt, usage.ru_majflt, usage.ru_nvcsw, usage.ru_nivcsw,
    )  # fmt: skip
