"""Stragglers: found when there, silent when not. Simulation; seeds are the test's own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.shared.comparison import roles_of
from rankscope_server.diagnose.straggler.detector import _with_memory
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import hours_text, percent_text
from rankscope_server.observe.deviation import deviation_of
from rankscope_server.verdict.answers import Look
from tests.analysis.program import Machine, Op
from tests.analysis.simulator import (
    CALM,
    MS,
    START_NS,
    Fault,
    Item,
    Job,
    Recording,
    analyse,
    apply,
    record,
    say,
    spoil,
    wide,
    without_fault,
)

SEEDS = range(20)


def above_info(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.severity != "info"]


def draw(seed: int, kind: str, num_stages: int) -> Job:
    chance = random.Random(seed)
    fault = Fault(kind, chance.randrange(4), chance.randint(80, 160), chance.uniform(0.5, 1.0))  # type: ignore[arg-type]
    return Job(num_stages=num_stages, seed=seed, faults=(fault,))


def mean_step(recording: Recording, from_step: int) -> float:
    times = [log.ended_ms - log.started_ms for log in recording.machine.ranks[0].log]
    return float(np.mean(times[from_step - 1 :]))


def look_at(items: Sequence[Item]) -> Look:
    state = RunState("run")
    apply(state, items)
    return state.look(START_NS + 10**12)


@pytest.mark.parametrize(("num_stages", "seeds"), [(1, 40), (4, 20)])
def test_healthy_runs_on_a_noisy_host_accuse_nobody(num_stages: int, seeds: int) -> None:
    notes = 0
    for seed in range(seeds):
        look = analyse(record(Job(seed=seed, num_stages=num_stages)))
        assert not above_info(look), (seed, above_info(look))
        assert look.verdict is None
        costly = [f for f in look.findings if f.state == "open" and f.cost_throughput_ratio > 0.02]
        worst = max(costly, key=lambda f: f.cost_throughput_ratio, default=None)
        lasting = "advice" if worst and worst.onset_step is None else "unknown"
        assert look.answer.state == (lasting if worst else "healthy"), look.answer
        notes += len(look.findings)
    say(f"{seeds} healthy runs, {num_stages} stages: nothing above info, {notes} notes")


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("kind", ["slow_compute", "slow_data"])
def test_a_slow_rank_is_named_with_kind_and_onset(num_stages: int, kind: str) -> None:
    hits, onsets = 0, []
    for seed in SEEDS:
        job = draw(seed, kind, num_stages)
        fault = job.faults[0]
        look = analyse(record(job))
        others = [f for f in above_info(look) if f.ranks != (fault.rank,)]
        assert not others, (seed, others)
        verdict = look.verdict
        if verdict is not None and (verdict.kind, verdict.ranks) == (kind, (fault.rank,)):
            hits += 1
            assert verdict.onset_step is not None
            onsets.append(abs(verdict.onset_step - fault.start))
    say(f"{kind}, {num_stages} stages: {hits} of {len(SEEDS)}, onset errors {sorted(onsets)}")
    assert hits >= 0.95 * len(SEEDS)
    assert np.quantile(onsets, 0.9) <= 3


@pytest.mark.parametrize("num_stages", [1, 4])
def test_the_cost_is_the_difference_to_the_same_run_without_the_fault(num_stages: int) -> None:
    errors = []
    for seed in range(6):
        job = Job(num_stages=num_stages, seed=seed, noise=CALM, steps=200,
                  faults=(Fault("slow_compute", seed % 4, 90, 0.3 + 0.1 * seed),))  # fmt: skip
        slow, healthy = record(job), record(without_fault(job))
        truth = 1 - mean_step(healthy, 90) / mean_step(slow, 90)
        verdict = analyse(slow).verdict
        assert verdict is not None
        assert verdict.cost_throughput_ratio is not None
        errors.append(verdict.cost_throughput_ratio - truth)
    say(f"cost errors in points, {num_stages} stages: {[round(100 * e, 1) for e in errors]}")
    assert max(map(abs, errors)) <= 0.03


def test_a_spell_that_is_over_recovers_with_its_last_step() -> None:
    job = Job(noise=CALM, faults=(Fault("slow_compute", 2, 60, 0.8, steps=150),))
    (finding,) = above_info(analyse(record(job)))
    assert finding.state == "recovered"
    assert finding.ended_step is not None
    assert abs(finding.ended_step - 209) <= 3
    assert analyse(record(job)).verdict is None


def test_a_short_spell_is_a_note() -> None:
    job = Job(noise=CALM, faults=(Fault("slow_compute", 2, 100, 0.8, steps=10),))
    findings = analyse(record(job)).findings
    assert [(f.severity, f.ranks, f.onset_step, f.ended_step) for f in findings] == [
        ("info", (2,), 100, 109)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_too_few_peers_a_rank_is_compared_with_its_own_past(num_ranks: int) -> None:
    job = Job(num_ranks=num_ranks, faults=(Fault("slow_compute", 1, 120, 0.8),))
    verdict = analyse(record(job)).verdict
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.onset_step is not None
    assert abs(verdict.onset_step - 120) <= 3
    assert "before" in verdict.what
    assert "no peers" in verdict.confidence_text


def test_steps_that_save_do_not_count_in_a_ranks_own_past() -> None:
    """They take three times as long, and are half of the first steps."""

    def build(rank: int, step: int, now_ms: float) -> list[Op]:
        saves = step % (2 if step <= 60 else 50) == 0
        work_ms = 40.0 * (1.0 + 0.02 * (step % 3)) * (3.0 if saves else 1.0)
        ops = [Op("compute", "forward", work_ms * (2.2 if rank == 1 and step >= 120 else 1.0))]
        ops += [Op("compute", "checkpoint", 60.0)] * saves
        return [*ops, Op("issue", "backward", group="world"), Op("join", "backward")]

    job = Job(num_ranks=2, steps=300)
    machine = Machine(job.num_ranks, job.groups(), build, job.steps)
    machine.run()
    verdict = analyse(Recording(job, machine)).verdict
    assert verdict is not None
    assert verdict.what == (
        "Rank 1 on node-0 is 2.2\N{MULTIPLICATION SIGN} slower than before since step 120"
    )
    assert "against 40.8 ms (its own steps before)" in verdict.why


def test_without_peers_a_fault_from_the_first_step_names_nobody() -> None:
    job = Job(num_stages=4, noise=CALM, faults=(Fault("slow_compute", 1, 1, 0.8),))
    look = analyse(record(job))
    assert [finding.kind for finding in look.findings] == ["stage_imbalance"]  # it looks like one
    assert not look.findings[0].ranks
    assert look.verdict is None


def test_with_peers_a_fault_from_the_first_step_is_found() -> None:
    job = Job(num_ranks=8, noise=CALM, steps=200, faults=(Fault("slow_compute", 5, 1, 0.8),))
    verdict = analyse(record(job)).verdict
    assert verdict is not None
    assert verdict.ranks == (5,)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_when_all_become_slower_nobody_is_accused(num_stages: int) -> None:
    faults = tuple(Fault("slow_compute", rank, 120, 0.8) for rank in range(4))
    assert not above_info(analyse(record(Job(num_stages=num_stages, faults=faults))))


def test_two_equally_slow_ranks_do_not_hide_behind_each_other() -> None:
    faults = (Fault("slow_compute", 1, 80, 0.6), Fault("slow_compute", 6, 110, 0.6))
    look = analyse(record(Job(num_ranks=8, noise=CALM, steps=250, faults=faults)))
    assert {f.ranks for f in above_info(look)} == {(1,), (6,)}


def test_checkpoints_of_one_rank_are_not_slowness() -> None:
    job = Job(noise=CALM, checkpoint_every=20)
    assert not analyse(record(job)).findings


def test_a_resumed_run_has_its_own_step_numbers() -> None:
    job = Job(noise=CALM, first_step=5001, faults=(Fault("slow_data", 3, 100, 0.6),))
    verdict = analyse(record(job)).verdict
    assert verdict is not None
    assert verdict.onset_step == 5100


def test_missing_steps_are_no_health() -> None:
    recording = record(Job(noise=CALM, steps=120))
    chance = random.Random(1)
    items = [
        item
        for item in [*recording.registrations(), *recording.steps(per_chunk=1)]
        if not isinstance(item[1], tuple) or chance.random() > 0.45
    ]
    look = look_at(items)
    straggler = next(status for status in look.detectors if status.name == "straggler")
    assert straggler.state == "skipped"
    assert "missing" in straggler.reason
    assert look.answer.state == "unknown"


def test_one_percent_lost_and_doubled_changes_nothing_that_is_said() -> None:
    job = draw(3, "slow_compute", 1)
    recording = record(job)
    items = [*recording.registrations(), *recording.steps(per_chunk=1)]
    verdict = look_at(spoil(items, seed=5)).verdict
    assert verdict is not None
    assert verdict.ranks == (job.faults[0].rank,)
    assert verdict.onset_step is not None
    assert abs(verdict.onset_step - job.faults[0].start) <= 3


def noisy_work(num_ranks: int, num_steps: int, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    work = 100 * np.exp(chance.normal(0, 0.02, (num_ranks, num_steps)))
    drift = np.exp(np.cumsum(chance.normal(0, 0.005, num_steps)))
    hiccups = np.where(chance.random((num_ranks, num_steps)) < 0.01 / num_ranks, 2.0, 1.0)
    return np.asarray(work * drift * hiccups)


@pytest.mark.parametrize(("num_ranks", "seeds"), [(64, 5), (1024, 2)])
def test_wide_healthy_jobs_accuse_nobody(num_ranks: int, seeds: int) -> None:
    for seed in range(seeds):
        look = look_at(wide(noisy_work(num_ranks, 200, seed)))
        assert not above_info(look), seed


@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_a_tenth_slower_rank_of_many_is_found(num_ranks: int) -> None:
    work = noisy_work(num_ranks, 200, seed=7)
    work[37, 120:] *= 1.15
    verdict = look_at(wide(work)).verdict
    assert verdict is not None
    assert verdict.ranks == (37,)
    assert verdict.onset_step is not None
    assert abs(verdict.onset_step - 121) <= 3


def test_one_look_at_a_thousand_ranks_takes_well_below_a_second() -> None:
    items = wide(noisy_work(1024, 300, seed=1), per_chunk=299)
    state = RunState("wide")
    apply(state, items[:-1024])
    state.look(START_NS + 10**12)
    apply(state, items[-1024:])
    began = time.process_time()
    state.look(START_NS + 10**12 + 10**9)
    took = time.process_time() - began
    say(f"look at 1,024 ranks after one new step: {1000 * took:.0f} ms")
    assert took < 1.0


def test_looks_on_the_way_do_not_change_the_last_one() -> None:
    items = record(draw(2, "slow_compute", 4)).items()
    watched, once = RunState("run"), RunState("run")
    for begin in range(0, len(items), 37):
        apply(watched, items[begin : begin + 37])
        watched.look(START_NS + 10**12)
    apply(once, items)
    end = START_NS + 10**12
    assert watched.look(end).findings == once.look(end).findings


def test_order_does_not_matter() -> None:
    items = record(draw(4, "slow_data", 1)).items()
    shuffled = spoil(items, seed=9, lost=0.0)
    assert look_at(items).findings == look_at(shuffled).findings


@pytest.mark.core
def test_sentences_name_rank_step_reference_and_cost() -> None:
    job = Job(noise=CALM, faults=(Fault("slow_compute", 2, 140, 0.9),))
    verdict = analyse(record(job)).verdict
    assert verdict is not None
    assert verdict.what == (
        "Rank 2 on node-0 is 1.8\N{MULTIPLICATION SIGN} slower than its 3 peers since step 140"
    )
    assert "forward" in verdict.why
    assert "rank-hours a day" in verdict.why
    assert verdict.next
    assert verdict.would_be_wrong_if
    assert any("Slow data" in text for text in verdict.ruled_out)
    assert verdict.evidence[0].link == "runs/sim/ranks?sel=2@140"
    assert verdict.policy_hash


def test_of_an_ended_run_no_process_is_looked_at_and_the_cost_is_what_was_lost() -> None:
    job = Job(noise=CALM, faults=(Fault("slow_compute", 2, 140, 0.9),))
    recording, state = record(job), RunState("sim")
    apply(state, recording.items())
    now = START_NS + int(recording.last_ms * MS)
    live = state.look(now).verdict
    assert live is not None
    assert live.next_command.startswith("py-spy top --pid ")
    for rank in range(job.num_ranks):
        state.apply_record(schema.RankEnded(attempt=0, rank=rank, time_ns=now, reason="clean"))
    over = state.look(now).verdict
    assert over is not None
    assert over.next_command == ""
    assert "a day" not in over.why
    seconds = (recording.last_ms * MS + START_NS) / 1e9 - live.onset_ms / 1e3
    hours = over.cost_throughput_ratio * job.num_ranks * seconds / 3600
    assert over.cost_rank_hours == pytest.approx(hours, rel=0.02)
    assert f"4 ranks lost {percent_text(over.cost_throughput_ratio)}" in over.why
    assert f"{hours_text(over.cost_rank_hours)} in all" in over.why


def test_a_rank_many_times_as_slow_is_named_after_few_long_steps() -> None:
    """Twenty steps of 4 s each would take more than a minute."""
    for num_ranks in (2, 4):
        job = Job(
            num_ranks=num_ranks, steps=128, faults=(Fault("slow_compute", 1, 120, 60.0, steps=8),)
        )
        (finding,) = above_info(analyse(record(job)))
        assert finding.ranks == (1,)
        assert finding.onset_step == 120


@pytest.mark.parametrize(("burst", "calm"), [(4, 0), (8, 0), (30, 0), (4, 3), (12, 8)])
def test_other_work_just_before_does_not_hide_it(burst: int, calm: int) -> None:
    """A burst that makes the rank half as slow again, and a calm stretch, then the long steps."""
    before = Fault("slow_compute", 1, 120 - burst - calm, 1.0, steps=burst)
    for num_ranks in (2, 4):
        for num_long in (6, 8, 12):
            slow = Fault("slow_compute", 1, 120, 60.0, steps=num_long)
            job = Job(num_ranks=num_ranks, steps=119 + num_long, faults=(before, slow))
            (finding,) = above_info(analyse(record(job)))
            assert (finding.ranks, finding.onset_step) == ((1,), 120), (num_ranks, num_long)


@pytest.mark.parametrize("seed", range(6))
def test_two_of_three_ranks_that_became_slower_together_are_named(seed: int) -> None:
    """The third did as before: it is not the whole job."""
    chance = random.Random(seed)
    slow = sorted(chance.sample(range(3), 2))
    faults = tuple(Fault("slow_compute", rank, 100, chance.uniform(0.5, 1.5)) for rank in slow)
    look = analyse(record(Job(num_ranks=3, steps=300, seed=seed, faults=faults)))
    named = {rank for finding in above_info(look) for rank in finding.ranks}
    assert named == set(slow), [finding.what for finding in look.findings]


@pytest.mark.parametrize(("num_ranks", "num_slow"), [(2, 2), (3, 3), (4, 4)])
def test_where_all_became_slower_together_no_rank_is(num_ranks: int, num_slow: int) -> None:
    faults = tuple(Fault("slow_compute", rank, 100, 1.0) for rank in range(num_slow))
    look = analyse(record(Job(num_ranks=num_ranks, steps=260, seed=3, faults=faults)))
    assert not [finding for finding in above_info(look) if finding.ranks]
    assert look.answer.state != "healthy"


def watched(own_ms: np.ndarray, looks: Sequence[int]) -> list[Look]:
    """Return what is said of a wide job when so many of its steps have come."""
    state, items, at, said = RunState("run"), wide(own_ms), 0, []
    for count in looks:
        stop = count // 50 * len(own_ms) + len(own_ms)
        apply(state, items[at:stop])
        at = stop
        said.append(state.look(START_NS + 10**12 + count * 10**9))
    return said


LONG = 6000  # steps, more than the table holds


@pytest.mark.parametrize("over", [LONG, 5200])
def test_since_when_a_rank_is_slow_is_said_when_that_step_has_left(over: int) -> None:
    own_ms = noisy_work(4, LONG, seed=2)
    own_ms[3, 1000:over] *= 1.4
    (*_, before, last) = watched(own_ms, [*range(1000, LONG, 500), LONG])
    assert before.findings[0].onset_step == 1001
    slow = next(finding for finding in last.findings if finding.ranks == (3,))
    assert slow.onset_step == 1001
    if over == LONG:
        assert slow.state == "open"
        assert slow.what.endswith("slower than its 3 peers since step 1,001")
    else:
        assert (slow.state, slow.ended_step) == ("recovered", 5200)
        assert slow.what.endswith("slower than its 3 peers from step 1,001 to step 5,200")


def test_most_of_a_role_stays_slow_when_the_steps_before_have_left() -> None:
    own_ms = noisy_work(5, LONG, seed=4)
    own_ms[:4, 1000:] *= 1.3
    for look in watched(own_ms, [2000, 4000, 5000, 5500, LONG])[1:]:
        assert look.verdict is not None
        assert look.verdict.ranks == (0, 1, 2, 3)
        assert look.verdict.onset_step == 1001
        assert "since step 1,001" in look.answer.text


@pytest.mark.parametrize(("on", "period"), [(20, 60), (20, 100), (10, 40), (30, 80), (15, 30)])
def test_a_rank_that_is_slow_now_and_then_is_not_called_healthy(on: int, period: int) -> None:
    own_ms = noisy_work(8, 1500, seed=6)
    is_slow = (np.arange(1500) >= 200) & ((np.arange(1500) - 200) % period < on)
    own_ms[5, is_slow] *= 1.35
    cost = 1 - (np.delete(own_ms, 5, 0).max(0) / own_ms.max(0)).mean()
    for look in watched(own_ms, range(700, 1500, 50)):
        assert look.answer.state == "unknown", look.answer.text
        (slow,) = (finding for finding in look.findings if finding.detector == "straggler")
        assert (slow.severity, slow.state) == ("info", "open")
        assert slow.onset_step is not None
        assert abs(slow.onset_step - 201) <= 3
        assert slow.cost_throughput_ratio == pytest.approx(cost, abs=0.035)


def test_long_stretches_are_one_finding_by_what_they_cost_together() -> None:
    """A third of the time, 90 steps each: also between them the rank is named."""
    own_ms = noisy_work(8, 1800, seed=6)
    is_slow = (np.arange(1800) >= 200) & ((np.arange(1800) - 200) % 280 < 90)
    own_ms[5, is_slow] *= 1.4
    looks = watched(own_ms, range(1000, 1800, 100))
    for look in looks:
        assert look.verdict is not None
        assert look.verdict.ranks == (5,)
        assert look.verdict.onset_step == 201
        assert "% of the steps since step 201" in look.answer.text
        assert look.verdict.cost_throughput_ratio == pytest.approx(0.09, abs=0.025)
    assert "6 such stretches" in looks[-1].answer.detail


def test_a_rank_that_was_slow_twice_has_recovered_when_that_is_long_ago() -> None:
    own_ms = noisy_work(8, 3000, seed=6)
    own_ms[5, 200:400] *= 1.4
    own_ms[5, 700:900] *= 1.4
    (look,) = watched(own_ms, [2900])
    assert look.verdict is None
    (slow,) = (finding for finding in look.findings if finding.ranks == (5,))
    assert (slow.state, slow.onset_step, slow.ended_step) == ("recovered", 201, 900)
    assert "in 57 % of the steps from step 201 to step 900" in slow.what


def taking_turns(num_ranks: int, steps: int, seed: int) -> np.ndarray:
    """Return self times of ranks of which in each 200 steps another one works 1.4 times as long."""
    own_ms = noisy_work(num_ranks, steps, seed)
    for turn, begin in enumerate(range(100, steps, 200)):
        own_ms[turn % num_ranks, begin : begin + 200] *= 1.4
    return own_ms


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_where_another_rank_is_slow_each_time_none_is_accused(num_ranks: int) -> None:
    own_ms = taking_turns(num_ranks, 1500, seed=6)
    for look in watched(own_ms, range(1150, 1500, 50)):
        assert not above_info(look), [finding.what for finding in above_info(look)]
        assert look.answer.state != "healthy"
        assert any(f.cost_throughput_ratio > 0.1 for f in look.findings if f.state == "open")


def test_one_that_is_slow_for_longer_than_any_turn_is_accused() -> None:
    own_ms = taking_turns(4, 1900, seed=6)
    own_ms[:, 1300:] = noisy_work(4, 600, seed=7)
    own_ms[2, 1300:] *= 1.4
    verdict = watched(own_ms, [1900])[-1].verdict
    assert verdict is not None
    assert verdict.ranks == (2,)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_finding_of_before_is_over_only_where_its_rank_is_no_longer_slow(is_slow: bool) -> None:
    """Where nothing is left to compare the rank with, the last look is what is known of it."""
    own_ms = noisy_work(4, LONG, seed=2)
    own_ms[3, 1000:] *= 1.4
    state = RunState("run")
    apply(state, wide(own_ms))
    (old,) = (f for f in state.look(START_NS + 10**12).findings if f.detector == "straggler")
    (attempt,) = state._attempts.values()
    rank = 3 if is_slow else 1
    before = replace(old, onset_step=1001, ranks=(rank,), key="0/straggler/slow_compute/x")
    window = replace(attempt.window(START_NS + 10**12), before={before.key: before})
    deviation = deviation_of(window.steps, roles_of(window), POLICY)
    (kept,) = _with_memory(window, deviation, "straggler", [])
    if is_slow:
        assert kept == before
    else:
        assert (kept.state, kept.ended_step) == ("recovered", int(window.steps.steps[0]))
