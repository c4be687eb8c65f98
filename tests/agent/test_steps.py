from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rankscope import schema, steps
from rankscope.ring import STEP_FIELDS
from rankscope.steps import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, StepClock

NAMES = [name for name, _, _ in STEP_FIELDS[1:]]


class FakeRecorder:
    """Keeps the steps that a clock writes."""

    active = True
    collectives_in_step = 0
    step_flags = 0
    thread_blocked_ns = 0

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def set_training_thread(self, native_id: int) -> None:
        self.thread = native_id

    def set_phase(self, phase: int, since_ns: int) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def step_ended(self, values: tuple[int, ...]) -> None:
        self.steps.append(dict(zip(NAMES, values, strict=True)))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    moment = [0]
    monkeypatch.setattr(steps, "_now", lambda: moment[0])
    return moment


def clock_with(recorder: FakeRecorder) -> StepClock:
    clock = StepClock()
    clock.recorder = recorder  # type: ignore[assignment]
    return clock


def play(clock: StepClock, now: list[int], *moves: tuple[Any, int]) -> None:
    """Enter a phase, then let its time pass; a string "step" ends an optimizer."""
    for phase, duration in moves:
        clock.enter(phase)
        now[0] += duration
        if phase == OPTIMIZER:
            clock.enter(OTHER)
            clock.optimizers_ended()


def test_phases_add_up_to_the_step(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.sees_data = True
    play(clock, now, (DATA, 5), (FORWARD, 20), (BACKWARD, 40), (OTHER, 3), (OPTIMIZER, 7))
    (step,) = recorder.steps
    assert (step["data_ns"], step["forward_ns"], step["backward_ns"]) == (5, 20, 40)
    assert (step["other_ns"], step["optimizer_ns"]) == (3, 7)
    total = sum(step[f"{phase}_ns"] for phase in schema.PHASES)
    assert total == step["ended_ns"] - step["started_ns"] == 75
    assert step["flags"] & schema.STEP_FIRST
    assert step["microbatches"] == 1


def test_forward_is_guessed_without_a_data_loader(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    now[0] += 30  # forward, unseen
    clock.add_blocked(10)
    play(clock, now, (BACKWARD, 40), (OTHER, 2), (OPTIMIZER, 5))
    (step,) = recorder.steps
    assert (step["forward_ns"], step["forward_blocked_ns"], step["other_ns"]) == (30, 10, 2)


def test_what_is_told_of_phases_as_they_end_knows_a_forward(now: list[int]) -> None:
    clock, told = clock_with(FakeRecorder()), list[int]()
    clock.on_phase = told.append
    for _ in range(2):
        play(clock, now, (BACKWARD, 40), (OTHER, 2), (OPTIMIZER, 5))
    assert told == 2 * [FORWARD, BACKWARD, OTHER, OPTIMIZER]


def test_second_microbatch_from_one_batch_is_a_forward(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.sees_data = True
    play(
        clock, now,
        (DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OTHER, 10), (BACKWARD, 20), (OPTIMIZER, 5),
    )  # fmt: skip
    (step,) = recorder.steps
    assert (step["forward_ns"], step["other_ns"], step["microbatches"]) == (20, 0, 2)


def test_logging_before_the_next_batch_is_no_forward(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.sees_data = True
    play(clock, now, (DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    now[0] += 50
    play(clock, now, (DATA, 1), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[1]["other_ns"] == 50
    assert recorder.steps[1]["forward_ns"] == 10
    assert [step["step"] for step in recorder.steps] == [1, 2]


def test_pipeline_gaps_are_no_forward(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.forward_is_explicit = True
    play(clock, now, (FORWARD, 10), (OTHER, 30), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[0]["other_ns"] == 30


def test_second_optimizer_ends_no_second_step(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    play(clock, now, (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5), (OPTIMIZER, 5))
    assert len(recorder.steps) == 1


def test_evaluation_is_flagged(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    play(clock, now, (EVALUATION, 9), (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert recorder.steps[0]["evaluation_ns"] == 9
    assert recorder.steps[0]["flags"] & schema.STEP_EVALUATION


def test_explicit_steps_replace_the_optimizer_rule(now: list[int]) -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.explicit_steps = True
    play(clock, now, (FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5))
    assert not recorder.steps
    clock.renumber(101)
    clock.end_step()
    assert recorder.steps[0]["step"] == 101
    assert clock.step == 102


def test_real_time_passes() -> None:
    recorder = FakeRecorder()
    clock = clock_with(recorder)
    clock.enter(FORWARD)
    time.sleep(0.02)
    clock.end_step()
    assert recorder.steps[0]["forward_ns"] > 15_000_000


def test_the_last_step_is_the_one_that_was_done(now: list[int]) -> None:
    clock = clock_with(FakeRecorder())
    assert clock.last_step == 1
    play(clock, now, (BACKWARD, 20), (OPTIMIZER, 5))
    assert (clock.step, clock.last_step) == (2, 1)
    play(clock, now, (DATA, 5), (BACKWARD, 20))
    assert clock.last_step == 2


class OneThread:
    """A thread that calls what it is given, one after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, function: Callable[[], Any]) -> Any:
        return self._pool.submit(function).result(10)


def a_step(clock: StepClock) -> bool:
    is_ours = clock.trains()
    clock.enter(BACKWARD)
    clock.enter(OPTIMIZER)
    clock.enter(OTHER)
    if is_ours:
        clock.optimizers_ended()
    return is_ours


def test_the_thread_that_trains_has_the_steps() -> None:
    recorder = FakeRecorder()
    clock, thread = clock_with(recorder), OneThread()
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


def test_a_thread_takes_the_steps_over_when_the_other_has_stopped() -> None:
    clock, thread = clock_with(FakeRecorder()), OneThread()
    assert a_step(clock)
    assert [thread(lambda: a_step(clock)) for _ in range(10)] == [False] * 8 + [True] * 2
    assert clock.step == 4


def test_two_threads_that_train_at_once_take_nothing_from_each_other() -> None:
    clock, thread = clock_with(FakeRecorder()), OneThread()
    for _ in range(20):
        assert a_step(clock)
        assert not thread(lambda: a_step(clock))
    assert clock.step == 21


def test_engine_threads_inside_a_backward_pass_take_nothing() -> None:
    clock, thread = clock_with(FakeRecorder()), OneThread()
    assert clock.trains()
    clock.enter(BACKWARD)
    for _ in range(20):  # checkpointed layers: the engine's thread of a device runs their backward
        assert not thread(clock.trains)
    assert clock.is_ours()
