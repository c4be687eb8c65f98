from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.files.ring import HEAD_AT, STEP_FIELDS, RingReader
from rankscope.rank.steps import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, StepClock
from rankscope.wire import schema
from tests.agent.clocks import CORES, SECOND, pass_time, rings_in, seconds, step_clock

IN_PHASES = {f"{phase}{of}_ns" for phase in schema.PHASES for of in ("", "_blocked")}


class Kept:
    """Stands for a recorder: only rings, of which it reads the steps."""

    active = True
    collectives_in_step = 0
    step_flags = 0
    thread_blocked_ns = 0
    thread = 0

    def __init__(self, folder: Path) -> None:
        self.rings = rings_in(folder)

    def set_training_thread(self, native_id: int) -> None:
        self.thread = native_id

    def begin_step(self, step: int) -> None: ...

    @property
    def slots(self) -> Any:
        reader = RingReader(self.rings[1].path, STEP_FIELDS)
        return reader.read(np.arange(self.rings[1].words[HEAD_AT // 8]))[0]

    @property
    def steps(self) -> list[dict[str, int]]:
        """Phases in whole seconds, all else as it was written."""
        return [
            {name: seconds(int(slot[name])) if name in IN_PHASES else int(slot[name])
             for name, _, _ in STEP_FIELDS}
            for slot in self.slots
        ]  # fmt: skip


class OneClock:
    """A step clock with what it records, and time that passes when it is told to."""

    def __init__(self, core: str, folder: Path) -> None:
        self.recorder = Kept(folder)
        self.clock = step_clock(core)
        self.clock.recorder = self.recorder

    def pass_time(self, num_seconds: int) -> None:
        pass_time(self.clock, num_seconds)

    def play(self, *moves: tuple[int, int]) -> None:
        """Enter a phase, then let its time pass; an optimizer ends its step."""
        for phase, num_seconds in moves:
            self.clock.enter(phase)
            self.pass_time(num_seconds)
            if phase == OPTIMIZER:
                self.clock.enter(OTHER)
                self.clock.optimizers_ended()


@pytest.fixture(params=CORES)
def one(request: pytest.FixtureRequest, tmp_path: Path) -> OneClock:
    return OneClock(request.param, tmp_path)


def test_phases_add_up_to_the_step(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.sees_data = True
    one.play((DATA, 5), (FORWARD, 20), (BACKWARD, 40), (OTHER, 3), (OPTIMIZER, 7))
    (step,) = recorder.steps
    assert (step["data_ns"], step["forward_ns"], step["backward_ns"]) == (5, 20, 40)
    assert (step["other_ns"], step["optimizer_ns"]) == (3, 7)
    (slot,) = recorder.slots
    total = sum(int(slot[f"{phase}_ns"]) for phase in schema.PHASES)
    assert total == slot["ended_ns"] - slot["started_ns"]
    assert seconds(total) == 75
    assert step["flags"] & schema.STEP_FIRST
    assert step["microbatches"] == 1


def test_forward_is_guessed_without_a_data_loader(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    one.pass_time(30)  # forward, unseen
    clock.add_blocked(10 * SECOND)
    one.play((BACKWARD, 40), (OTHER, 2), (OPTIMIZER, 5))
    (step,) = recorder.steps
    assert (step["forward_ns"], step["forward_blocked_ns"], step["other_ns"]) == (30, 10, 2)


def test_what_is_told_of_phases_as_they_end_knows_a_forward(one: OneClock) -> None:
    clock, told = one.clock, list[int]()
    clock.on_phase = told.append
    for _ in range(2):
        one.play((BACKWARD, 40), (OTHER, 2), (OPTIMIZER, 5))
    assert told == 2 * [FORWARD, BACKWARD, OTHER, OPTIMIZER]


def test_second_microbatch_from_one_batch_is_a_forward(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.sees_data = True
    one.play(
        (DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OTHER, 10), (BACKWARD, 20), (OPTIMIZER, 5),
    )  # fmt: skip
    (step,) = recorder.steps
    assert (step["forward_ns"], step["other_ns"], step["microbatches"]) == (20, 0, 2)


def test_logging_before_the_next_batch_is_no_forward(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.sees_data = True
    one.play((DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    one.pass_time(50)
    one.play((DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[1]["other_ns"] == 50
    assert recorder.steps[1]["forward_ns"] == 10
    assert [step["step"] for step in recorder.steps] == [1, 2]


def test_pipeline_gaps_are_no_forward(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.forward_is_explicit = True
    one.play((FORWARD, 10), (OTHER, 30), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[0]["other_ns"] == 30


def test_second_optimizer_ends_no_second_step(one: OneClock) -> None:
    recorder = one.recorder
    one.play((FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5), (OPTIMIZER, 5))
    assert len(recorder.steps) == 1


def test_evaluation_is_flagged(one: OneClock) -> None:
    recorder = one.recorder
    one.play((EVALUATION, 9), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[0]["evaluation_ns"] == 9
    assert recorder.steps[0]["flags"] & schema.STEP_EVALUATION


def test_explicit_steps_replace_the_optimizer_rule(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.explicit_steps = True
    one.play((FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert not recorder.steps
    clock.renumber(101)
    clock.end_step()
    assert recorder.steps[0]["step"] == 101
    assert clock.step == 102


def test_real_time_passes(one: OneClock) -> None:
    clock, recorder = one.clock, one.recorder
    clock.enter(FORWARD)
    time.sleep(0.02)
    clock.end_step()
    assert recorder.slots[0]["forward_ns"] > 15_000_000


def test_the_last_step_is_the_one_that_was_done(one: OneClock) -> None:
    clock = one.clock
    assert clock.last_step == 1
    one.play((BACKWARD, 20), (OPTIMIZER, 5))
    assert (clock.step, clock.last_step) == (2, 1)
    one.play((DATA, 5), (BACKWARD, 20))
    assert clock.last_step == 2


class OneThread:
    """A thread that calls what it is given, one after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, function: Callable[[], Any]) -> Any:
        return self._pool.submit(function).result(10)


def a_step(clock: StepClock) -> bool:
    if not clock.trains():  # as the hook of backward passes does
        return False
    clock.enter(BACKWARD)
    clock.enter(OPTIMIZER)
    clock.enter(OTHER)
    clock.optimizers_ended()
    return True


def test_the_thread_that_trains_has_the_steps(one: OneClock) -> None:
    clock, recorder, thread = one.clock, one.recorder, OneThread()
    assert clock.is_ours()
    assert not thread(clock.is_ours)
    assert all(thread(lambda: a_step(clock)) for _ in range(3))
    assert thread(clock.is_ours)
    assert not clock.is_ours()
    assert recorder.thread == clock.native_id == thread(threading.get_native_id)
    assert [step["step"] for step in recorder.steps] == [1, 2, 3]
    assert recorder.steps[0]["flags"] & schema.STEP_FIRST
    clock.enter(DATA)  # of a thread that does not train
    assert clock.phase == OTHER


def test_a_thread_takes_the_steps_over_when_the_other_has_stopped(one: OneClock) -> None:
    clock, thread = one.clock, OneThread()
    assert a_step(clock)
    assert [thread(lambda: a_step(clock)) for _ in range(10)] == [False] * 8 + [True] * 2
    assert clock.step == 4


def test_two_threads_that_train_at_once_take_nothing_from_each_other(one: OneClock) -> None:
    clock, thread = one.clock, OneThread()
    for _ in range(20):
        assert a_step(clock)
        assert not thread(lambda: a_step(clock))
    assert clock.step == 21


def test_engine_threads_inside_a_backward_pass_take_nothing(one: OneClock) -> None:
    clock, thread = one.clock, OneThread()
    assert clock.trains()
    clock.enter(BACKWARD)
    for _ in range(20):  # checkpointed layers: the engine's thread of a device runs their backward
        assert not thread(clock.trains)
    assert clock.is_ours()
