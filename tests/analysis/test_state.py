"""What a run says of itself when little or nothing is wrong, and that memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.wire import formulas, schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.observe import step_table
from rankscope_server.observe.step_table import HEAD, StepTable
from tests.analysis.records import registered
from tests.analysis.simulator import CALM, MS, START_NS, Fault, Job, apply, record


def watched(steps: int, drop_rank: int | None = None, num_ranks: int = 4) -> RunState:
    recording = record(Job(num_ranks=num_ranks, steps=steps, noise=CALM))
    state = RunState("run")
    for item in [*recording.items(), *recording.states(recording.last_ms)]:
        what = item[1]
        rank = what[0].rank if isinstance(what, tuple) else what.rank
        if rank != drop_rank:
            apply(state, [item])
    return state


def test_before_anything_came() -> None:
    look = RunState("run").look(START_NS)
    assert look.answer.state == "waiting"
    assert look.status == "starting"
    assert [status.state for status in look.detectors] == ["skipped"] * len(DETECTORS)


def test_too_few_steps_is_a_sentence_not_health() -> None:
    look = watched(12).look(START_NS + 10**10)
    assert look.answer.text == "No verdict yet: needs 20 steps, has 12"
    assert look.answer.state == "waiting"


def test_health_says_what_was_looked_at() -> None:
    state = watched(60)
    look = state.look(START_NS + 10**10)
    ran = sum(status.state == "ran" for status in look.detectors)
    assert look.answer.text == (
        f"Healthy: 4 ranks, 60 steps, {ran} detectors found nothing above 2.0 % of throughput"
    )
    skipped = [status.name for status in look.detectors if status.state == "skipped"]
    assert skipped
    assert all(name in look.answer.detail for name in skipped)
    assert look.coverage.text == "4 of 4 ranks reporting"
    assert look.status == "running"


def test_a_rank_that_never_reported_is_no_health() -> None:
    look = watched(60, drop_rank=2).look(START_NS + 10**10)
    assert look.answer.state == "unknown"
    assert look.coverage.text == "3 of 4 ranks reporting; rank 2 never heard of"


def test_a_run_that_nothing_comes_from_any_more_is_silent() -> None:
    state = watched(60)
    now = START_NS + 10**10
    state.look(now)
    look = state.look(now + 60 * 10**9)
    assert look.status == "silent"
    assert [row.rank for row in look.coverage.silent] == [0, 1, 2, 3]
    assert look.answer.state == "unknown"


def test_what_was_found_before_all_fell_silent_is_not_the_first_thing_said() -> None:
    job = Job(num_ranks=4, steps=200, noise=CALM, faults=(Fault("slow_compute", 3, 80, size=0.5),))
    recording, state = record(job), RunState("run")
    apply(state, recording.items())
    now = START_NS + int(recording.last_ms * MS)
    look = state.look(now)
    assert look.verdict is not None
    assert look.answer.text == look.verdict.what
    silent = state.look(now + 60 * 10**9)
    assert silent.verdict is not None
    assert silent.answer.text == (f"No rank reports any more; before that: {silent.verdict.what}")


def test_an_answer_of_a_server_that_is_behind_says_so() -> None:
    """And its own delay, here longer than a rank may be silent, is the silence of no rank."""
    state = watched(60)
    now = START_NS + 10**10
    state.look(now)
    later = now + 60 * 10**9
    look = state.look(later - 59 * 10**9, 59.0)
    assert "behind by 59 s" in look.answer.detail
    assert look.answer.notes[0].startswith("The server is behind")
    assert not look.coverage.silent
    assert look.status == "running"


def test_one_rank_alone_is_no_health_either() -> None:
    look = watched(60, num_ranks=1).look(START_NS + 10**10)
    assert look.answer.state == "unknown"
    assert "one rank" in look.answer.text


def test_losses_are_said() -> None:
    state = watched(60)
    for count in (5, 412, 5):
        state.apply_record(schema.Loss(
            attempt=0, rank=3, time_ns=START_NS, source="collectives", reason="overwritten",
            count=count,
        ))  # fmt: skip
    look = state.look(START_NS + 10**10)
    assert [row.count for row in look.coverage.losses] == [412]
    assert "412 records lost" in look.answer.text


def columns(
    first: int, count: int, own_ms: float = 80.0, step_ms: float = 100.0
) -> dict[str, np.ndarray]:
    found = {name: np.zeros(count, np.int64) for name in schema.STEP_COLUMNS}
    found["step"] = np.arange(first, first + count)
    found["started_ns"] = START_NS + found["step"] * 100 * MS
    found["duration_ns"] = np.full(count, int(step_ms * MS))
    found["forward_ns"] = np.full(count, int(own_ms * MS))
    found["backward_ns"] = found["duration_ns"] - found["forward_ns"]
    found["backward_blocked_ns"] = found["backward_ns"]
    return found


def test_the_table_is_bounded_and_keeps_its_first_steps() -> None:
    table = StepTable(capacity=256)
    for first in range(1, 2000, 10):
        for rank in range(4):
            table.put(rank, columns(first, 10, own_ms=80.0 if first < 100 else 90.0))
    assert table.num_steps <= 256
    assert table.num_steps + table.dropped_steps == 2000
    assert int(table.steps[-1]) == 2000
    assert table.head("own").shape == (4, HEAD)
    assert np.allclose(table.head("own"), 80.0)
    assert np.allclose(table.get("own"), 90.0)


def test_of_many_ranks_fewer_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 ranks with 4,096 steps would take two gigabytes."""
    monkeypatch.setattr(step_table, "_MOST_CELLS", 4 * 200)
    monkeypatch.setattr(step_table, "_FEWEST_STEPS", 100)
    table = StepTable()
    for begin, ranks, most in ((1, 1, 800), (1501, 4, 200), (3001, 16, 100)):
        for first in range(begin, begin + 1500, 10):
            for rank in range(ranks):
                table.put(rank, columns(first, 10))
        assert most * 7 // 8 - 10 <= table.num_steps <= most
        assert int(table.steps[-1]) == begin + 1499
        assert np.isfinite(table.get("own")).all()


def test_a_late_step_in_the_middle_finds_its_place() -> None:
    table = StepTable()
    table.put(0, columns(1, 10))
    table.put(0, columns(21, 10))
    table.put(1, columns(11, 10, own_ms=50.0))
    assert table.steps.tolist() == list(range(1, 31))
    assert np.isnan(table.get("own")[0, 10:20]).all()
    assert np.allclose(table.get("own")[1, 10:20], 50.0)


def test_an_onset_is_remembered_when_its_step_has_left_the_table() -> None:
    state = RunState("run")
    for rank in range(4):
        state.apply_record(registered(rank, 4, host="a"))
    onsets = set()
    for first in range(1, 6001, 500):
        for rank in range(4):
            slow = rank == 1 and first > 500
            step_ms = 100.0 if first > 500 else 65.0
            part = columns(first, 500, own_ms=95.0 if slow else 60.0, step_ms=step_ms)
            data = f"{rank} {first}".encode()
            state.apply_chunk(
                schema.Chunk(kind="steps", attempt=0, rank=rank, host="a", count=500,
                             time_lo_ns=first, time_hi_ns=int(part["started_ns"][-1]), data=data),
                dict(part),
            )  # fmt: skip
        verdict = state.look(START_NS + first).verdict
        if verdict is not None:
            onsets.add((verdict.ranks, verdict.onset_step))
    assert onsets == {((1,), 501)}


def test_detectors_have_unique_names_and_a_sentence() -> None:
    names = [detector.name for detector in DETECTORS]
    assert len(set(names)) == len(names)
    assert all(detector.__doc__ and detector.__doc__.endswith(".") for detector in DETECTORS)


def test_another_threshold_is_another_hash() -> None:
    assert Policy().hash == POLICY.hash
    assert Policy(min_steps=21).hash != POLICY.hash
    assert len(POLICY.hash) == 12


def test_formulas() -> None:
    assert formulas.bubble_fraction(4, 8) == pytest.approx(3 / 11)
    assert formulas.throughput_loss(150.0, 100.0) == pytest.approx(1 / 3)
    assert formulas.throughput_loss(0.0, 1.0) == 0.0
    assert formulas.rank_hours_per_day(64, 0.11) == pytest.approx(168.96)
    assert formulas.outlier_cut(1024 * 500) == pytest.approx(6.1, abs=0.05)
    assert formulas.busbw_bytes_per_second("all_reduce", 8e9, 2.0, 4) == pytest.approx(6e9)
    assert formulas.busbw_bytes_per_second("barrier", 0, 1.0, 4) is None
    assert formulas.algbw_bytes_per_second(1.0, 0.0) is None
