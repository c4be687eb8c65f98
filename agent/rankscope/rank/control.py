"""What the server asks of this rank, done by its main thread at step boundaries.

With nothing asked a boundary costs one comparison of times, and a stat once a second. Stacks are
not asked for here: a signal takes them while Python is stuck.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from rankscope.files.commands import (
    ANSWERS,
    MAX_BYTES,
    REQUESTS,
    Answers,
    RankAnswer,
    decode_requests,
    encode,
)
from rankscope.files.run_directory import replace_file
from rankscope.rank.context import Context
from rankscope.rank.profiler import ProfilerRefused, ProfilerWindow
from rankscope.wire import schema
from rankscope.wire.schema import Command

LOOK_SECONDS = 1.0
_MAX_ANSWERS = 64


class Switches(Protocol):
    """What commands do to the runtime."""

    def switch_off(self) -> None:
        """Record only where the rank is."""

    def switch_on(self, *, is_alone: bool) -> None:
        """Record again; `is_alone`: other collectives were left out here than in the peers."""

    def thin(self, level: int) -> None:
        """Put a level of thinning in force that all ranks have agreed on."""

    def thin_for_server(self, level: int, why: str) -> None:
        """Put the level in force that a server needs, `why` being its words; 0 takes it back."""


class Control:
    """Commands of one rank. `at_boundary` is called by the main thread between two steps."""

    def __init__(self, context: Context, switches: Switches) -> None:
        self._context, self._switches = context, switches
        self._next_look_ns = 0
        self._seen = (0, 0)  # inode and time of the requests read last
        self._waiting: list[Command] = []
        self._answers = Answers(answers={})
        self._window: ProfilerWindow | None = None
        self._profiled: Command | None = None
        self._went_off_alone = False
        # how many boundaries make a step, for the time in which no hook counts steps
        self._boundaries = 0
        self._per_step = 1
        self._step = 0

    def at_boundary(self, now_ns: int) -> None:
        """Do what is asked and due. `now_ns` is of the monotonic clock."""
        self._count_steps()
        if self._window is not None and not self._boundaries:
            self._profile_on(self._window)
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + int(LOOK_SECONDS * 1e9)
            self._look()
        if self._waiting and not self._boundaries:
            self._do_due()

    def close(self) -> None:
        """The process ends."""
        if self._window is not None:
            self._window.abandon("the process ended before it was done")
            self._window = None

    # --- steps ---------------------------------------------------------------------------

    def _count_steps(self) -> None:
        """While the hooks are out, go on counting: the rank is alive, and where it is matters."""
        context, clock = self._context, self._context.clock
        self._boundaries += 1
        if not context.is_off or clock.explicit_steps:
            if clock.step != self._step:
                self._step, self._per_step, self._boundaries = clock.step, self._boundaries, 0
        elif self._boundaries >= self._per_step:
            self._boundaries = 0
            clock.step += 1
        if context.is_off and context.recorder is not None:
            context.recorder.begin_step(clock.step)
            context.recorder.set_phase(0, time.monotonic_ns())

    # --- the files -----------------------------------------------------------------------

    def _look(self) -> None:
        """Read the requests if they changed; what the collector withdrew is forgotten."""
        path = self._directory() / REQUESTS
        try:
            status = os.stat(path)
        except OSError:
            self._waiting = []
            return
        seen = (status.st_ino, status.st_mtime_ns)
        if seen == self._seen or status.st_size > MAX_BYTES:
            return
        self._seen = seen
        requests = decode_requests(path.read_bytes())
        self._waiting = [command for command in requests if command.id not in self._answers.answers]

    def _answer(self, command: Command, answer: RankAnswer) -> None:
        answers = self._answers.answers
        answers[command.id] = answer
        for old in sorted(answers)[:-_MAX_ANSWERS]:
            del answers[old]
        replace_file(self._directory() / ANSWERS, encode(self._answers))

    def _directory(self) -> Path:
        recorder = self._context.recorder
        assert recorder is not None
        return recorder.directory

    # --- doing ---------------------------------------------------------------------------

    def _do_due(self) -> None:
        for command in list(self._waiting):
            if command.kind == "profile":
                if self._window is not None:
                    continue  # one after the other
                self._waiting.remove(command)
                self._start_profile(command)
            elif self._context.clock.step >= command.at_step:
                self._waiting.remove(command)
                if command.kind == "thin":
                    self._thin(command)
                else:
                    self._switch(command)

    def _thin(self, command: Command) -> None:
        """Record more or less from this step on, as all ranks do."""
        if command.asked_by.startswith(schema.SHEDDING):
            why = command.asked_by.removeprefix(schema.SHEDDING)
            self._switches.thin_for_server(command.level, why)
        else:
            self._switches.thin(command.level)
        self._answer(command, RankAnswer("done", f"from step {self._context.clock.step} on"))

    def will_thin(self) -> bool:
        """Whether a level has been agreed for budgets whose step is still to come."""
        return any(
            command.kind == "thin" and not command.asked_by.startswith(schema.SHEDDING)
            for command in self._waiting
        )

    def _switch(self, command: Command) -> None:
        """Take the hooks out, or put them in again.

        Sequences count the collectives that were seen. They match those of the peers only if
        all ranks left out the same ones, so all switch before the same step; a rank that does
        not continues under group names of its own.
        """
        context, step = self._context, self._context.clock.step
        in_time = command.is_everyone and step == command.at_step
        reason = f"before step {step}"
        if context.is_off == (command.kind == "agent_off"):
            reason = "it already was"
        elif not (context.clock.explicit_steps or context.clock.saw_optimizer):
            refused = "no optimizer of torch shows its steps: it could not be switched on again"
            self._answer(command, RankAnswer("refused", refused))
            return
        elif command.kind == "agent_off":
            self._switches.switch_off()
            self._went_off_alone = not in_time
            self._answers.is_recording = False
        else:
            is_alone = self._went_off_alone or not in_time
            self._switches.switch_on(is_alone=is_alone)
            self._answers.is_recording = not is_alone
            if is_alone:
                reason += "; its collectives are no longer matched with those of its peers"
        self._answer(command, RankAnswer("done", reason))

    def _start_profile(self, command: Command) -> None:
        steps = min(max(command.num_steps, 1), schema.MAX_PROFILE_STEPS)
        window = ProfilerWindow(self._directory() / f"trace.{command.id}.json", steps)
        try:
            window.start()
        except ProfilerRefused as refused:
            self._answer(command, RankAnswer("refused", str(refused)))
            return
        self._window, self._profiled = window, command
        first = self._context.clock.step
        reason = f"steps {first} to {first + steps - 1}"
        self._answer(command, RankAnswer("running", reason))

    def _profile_on(self, window: ProfilerWindow) -> None:
        """Count a step of the profile, or end it."""
        command = self._profiled
        assert command is not None
        try:
            reason = window.step_ended()
        except ProfilerRefused as refused:
            answer = RankAnswer("refused", str(refused))
        else:
            if not reason:
                return
            answer = RankAnswer("done", reason, window.path.name)
        self._window = self._profiled = None
        self._answer(command, answer)
