"""Where waits are known in one step of many, slow ranks are sought in those, however far apart."""

from __future__ import annotations

from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look
from tests.analysis import simulator
from tests.simulator.delivery import apply
from tests.simulator.dropping import Drop, left_of
from tests.simulator.told import MS, START_NS

STEPS, ONSET, EVERY, RANKS = 3_200, 1_601, 64, 2


def look(*, from_step: int = 1, fault: str = "slow_compute") -> Look:
    """Return what is said where steps from some on tell nothing but their times, 63 in 64."""
    planted = (simulator.Fault(fault, 1, ONSET, 0.9),) if fault else ()  # type: ignore[arg-type]
    recording = simulator.record(
        simulator.Job(
            num_ranks=RANKS, steps=STEPS, step_ms=25.0, noise=simulator.CALM, faults=planted, seed=3
        )
    )
    hidden = frozenset(step for step in range(from_step, STEPS + 1) if step % EVERY)
    items = recording.items()
    items += recording.states(recording.last_ms)
    drop = Drop("seen", frozenset(range(RANKS)), "some", hidden)
    state = RunState("sparse")
    apply(state, left_of(sorted(items, key=lambda item: item[0]), [drop]))
    return state.look(START_NS + int((recording.last_ms + 1) * MS))


def test_a_slow_rank_is_named() -> None:
    seen = look(from_step=200)
    assert seen.verdict is not None, seen.answer
    assert (seen.verdict.kind, seen.verdict.ranks) == ("slow_compute", (1,))


def test_with_too_few_steps_of_before_there_is_no_peace() -> None:
    seen = look()
    assert seen.verdict is not None
    assert seen.verdict.ranks == (1,)
    assert seen.answer.state == "culprit"


def test_nobody_is_named_where_nobody_is_slow() -> None:
    seen = look(fault="")
    assert seen.verdict is None
    assert seen.answer.state == "healthy", seen.answer
