"""Processes that are kept from running: named by what the kernel says, never by one sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from rankscope.wire.sample_columns import MACHINE_PAUSED
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.stalls.stopped_process import Stops, stops_of
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from tests.analysis.process_samples import job, look_at, process_samples
from tests.analysis.simulator import START_NS, Item, apply
from tests.analysis.timeline import Timeline

S = 10**9


def stops(codes: Sequence[int], every: float = 1.0) -> Stops | None:
    times = [int(S * every * at) for at in range(len(codes))]
    return stops_of(3, times, codes, POLICY)


@pytest.mark.parametrize("codes", [[], [0] * 50, [0, 1, *[0] * 50], [1]])
def test_one_sample_is_no_stop(codes: list[int]) -> None:
    assert stops(codes) is None


def test_a_stop_that_goes_on() -> None:
    found = stops([0] * 20 + [1] * 40)
    assert found is not None
    assert (found.is_whole, found.is_over, found.by) == (True, False, 1)
    assert found.end_ns - found.begin_ns == found.stopped_ns
    assert found.stopped_ns == 40 * S
    assert found.cost(POLICY) == pytest.approx(1.0, abs=0.03)


def test_stops_of_three_seconds_now_and_then() -> None:
    found = stops(([0] * 17 + [2] * 3) * 4)
    assert found is not None
    assert (found.is_whole, found.is_over, found.by) == (False, False, 2)
    assert (found.num_stopped, found.stopped_ns) == (12, 12 * S)
    assert found.cost(POLICY) == pytest.approx(0.19, abs=0.01)


def test_a_short_stop_costs_what_it_takes_of_half_a_minute_and_is_over_soon() -> None:
    found = stops([0] * 20 + [1] * 3 + [0] * 10)
    assert found is not None
    assert not found.is_over
    assert found.cost(POLICY) == pytest.approx(0.1)
    over = stops([0] * 20 + [1] * 3 + [0] * 40)
    assert over is not None
    assert (over.is_over, over.stopped_ns) == (True, 3 * S)


def test_stops_long_ago_are_another_story() -> None:
    found = stops([1] * 100 + [0] * 400 + [3] * 2 + [0] * 3)
    assert found is not None
    assert (found.by, found.num_stopped, found.begin_ns) == (3, 2, 500 * S)


def test_samples_that_are_lost_count_as_neither() -> None:
    times = [at * S for at in (*range(10), *range(100, 110))]
    found = stops_of(0, times, [0] * 8 + [1] * 4 + [0] * 8, POLICY)
    assert found is not None
    assert found.stopped_ns <= 6 * S


def test_a_pause_of_the_machine_counts_for_the_time_before_the_sample_that_tells_it() -> None:
    times = [at * S for at in (*range(20), *range(30, 40))]
    found = stops_of(0, times, [0] * 20 + [MACHINE_PAUSED] + [0] * 9, POLICY)
    assert found is not None
    assert (found.by, found.num_stopped, found.is_over) == (MACHINE_PAUSED, 1, False)
    assert (found.begin_ns, found.last_ns, found.stopped_ns) == (20 * S, 30 * S, 10 * S)


def test_what_stopped_it_for_longest_is_told() -> None:
    """The first sample after a pause may find a rank that is not let go yet."""
    times = [at * S for at in (*range(20), 30, 30.1, *range(31, 40))]
    found = stops_of(0, times, [0] * 20 + [MACHINE_PAUSED, 1] + [0] * 9, POLICY)
    assert found is not None
    assert (found.by, found.num_times) == (MACHINE_PAUSED, 1)
    assert stops([0] * 5 + [2] + [1] * 3).by == 1  # type: ignore[union-attr]


def test_any_number_may_say_who_stopped_it() -> None:
    """An array with a place for each number below it would fill the memory."""
    found = stops([0] * 5 + [1 << 60] * 3)
    assert found is not None
    assert found.by == 1 << 60


def with_states(
    run: Timeline, code: Callable[[int, float], int], *, is_known: bool = True
) -> list[Item]:
    """Return a run with samples in which `code(rank, second)` says who stopped a process."""
    items = process_samples(run, lambda *_: 0.0)
    for rank, (_, item) in enumerate(items):
        columns = item[1] if isinstance(item, tuple) else {}
        seconds = np.arange(len(columns["rank"]))
        columns["stopped_by"] = np.array([code(rank, second) for second in seconds])
        columns["pid"] = np.full(len(seconds), 1000 + rank)
        if not is_known:
            del columns["stopped_by"]
    return [*run.items(), *items]


def found_in(items: list[Item]) -> list[Finding]:
    return [finding for finding in look_at(items).findings if finding.kind == "stopped_process"]


def test_a_rank_that_is_stopped_in_every_step_is_named_as_stopped_not_as_slow() -> None:
    run = job(1, slow=5, onset=80, extra_ms=150.0, phase="forward")
    chance = random.Random(1)
    items = with_states(run, lambda r, s: int(r == 5 and s >= 9 and chance.random() < 0.6))
    look = look_at(items)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("stopped_process", (5,))
    assert "Rank 5 on node-0 is stopped again and again since step" in look.verdict.what
    assert [one.key.split("/")[1] for one in look.verdict.folded] == ["straggler"]
    assert {f.ranks for f in look.findings if f.severity != "info"} == {(5,)}


def test_ranks_that_were_paused_with_their_machine_are_one_finding() -> None:
    run = job(3, slow=0, onset=999, extra_ms=0.0, phase="forward")
    items = with_states(run, lambda r, s: MACHINE_PAUSED * int(r in (4, 5) and s in (6, 9)))
    (found,) = found_in(items)
    assert (found.ranks, found.state) == ((4, 5), "open")
    assert "were paused for" in found.what
    assert "2 times" in found.what
    assert found.what.endswith("with the machine or container")
    assert not found.next_command


def test_ranks_that_are_stopped_together_are_one_finding() -> None:
    run = job(2, slow=0, onset=999, extra_ms=0.0, phase="forward")
    (found,) = found_in(with_states(run, lambda r, s: int(r in (2, 3) and s >= 8)))
    assert (found.ranks, found.severity, found.state) == ((2, 3), "critical", "open")
    assert found.what.startswith("Ranks 2 and 3 on node-0 are stopped since step")
    assert set(found.victims) == {0, 1, 4, 5, 6, 7}


def test_the_onset_is_kept_when_its_step_has_left_the_table() -> None:
    run = job(4, slow=0, onset=999, extra_ms=0.0, phase="forward")
    state = RunState("run")
    apply(state, with_states(run, lambda r, s: int(r == 1 and s >= 8)))
    (before,) = found_now(state)
    (attempt,) = state._attempts.values()
    attempt.steps._drop(attempt.steps.num_steps - 5)
    (after,) = found_now(state)
    assert after.onset_step == before.onset_step is not None


def test_a_rank_that_tells_of_itself_again_is_the_same_process() -> None:
    run = job(5, slow=0, onset=999, extra_ms=0.0, phase="forward")
    items = with_states(run, lambda r, s: int(r == 1 and s >= 8))
    state = RunState("run")
    apply(state, items)
    (attempt,) = state._attempts.values()
    last_ns = max(time_ns for time_ns, _ in items)
    state.apply_record(replace(attempt.ranks[1], time_ns=last_ns, sources={"x": "thinned"}))
    assert [f.ranks for f in found_now(state)] == [(1,)]
    state.apply_record(replace(attempt.ranks[1], time_ns=last_ns + 1, pid=4711))
    assert not found_now(state)  # another process, of which there is no sample


def found_now(state: RunState) -> list[Finding]:
    findings = state.look(START_NS + 10**12).findings
    return [finding for finding in findings if finding.kind == "stopped_process"]


@pytest.mark.parametrize("is_known", [True, False])
def test_nobody_is_named_where_nothing_is_stopped_or_known(is_known: bool) -> None:
    run = job(3, slow=0, onset=999, extra_ms=0.0, phase="forward")
    items = with_states(run, lambda *_: 0, is_known=is_known)
    assert not found_in(items)
    (status,) = (
        detector for detector in look_at(items).detectors if detector.name == "stopped-process"
    )
    assert status.state == ("ran" if is_known else "skipped")
