"""Kinds that need a second signal: proved by it, and not claimed without it. Simulation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.sample_table import SampleTable
from tests.analysis.process_samples import (
    RANKS,
    STEP_MS,
    STEPS,
    chunk,
    job,
    look_at,
    process_samples,
)
from tests.analysis.simulator import MS, START_NS, Item, apply, spoil
from tests.analysis.timeline import Act, Timeline, noisy

Extra = Callable[[int, int], dict[str, int]]


def gpu_samples(run: Timeline, clock: Callable[[int, float], tuple[int, int]]) -> list[Item]:
    end_ms = run.ranks[0].steps[-1]["ended"]
    times = np.arange(0, end_ms, 1000.0)
    items: list[Item] = []
    for rank in range(RANKS):
        columns: dict[str, Column] = {
            name: np.full(len(times), -1, np.int64) for name in schema.CHUNK_COLUMNS["gpu"]
        }
        columns["time_ns"] = START_NS + (times * MS).astype(np.int64)
        columns["gpu"] = np.full(len(times), rank)
        read = [clock(rank, time) for time in times]
        columns["sm_clock_mhz"] = np.array([mhz for mhz, _ in read])
        columns["throttle_reasons"] = np.array([bits for _, bits in read])
        items.append(chunk("gpu", "node-0", columns, rank))
        owner: dict[str, Column] = {
            "time_ns": np.array([START_NS]), "interval_ns": np.array([0]), "gpu": np.array([rank]),
            "pid": np.array([1000 + rank]), "rank": np.array([rank]),
            "memory_bytes": np.array([0]),
        }  # fmt: skip
        items.append(chunk("gpu_process", "node-0", owner, rank))
    return items


def the_straggler(items: list[Item], rank: int) -> Finding:
    found = [f for f in look_at(items).findings if f.detector == "straggler"]
    assert [f.ranks for f in found] == [(rank,)]
    return found[0]


def draw(seed: int) -> tuple[int, int, float]:
    chance = random.Random(seed)
    return chance.randrange(RANKS), chance.randint(80, 120), chance.uniform(30, 90)


@pytest.mark.parametrize("seed", range(5))
def test_pauses_of_the_collector(seed: int) -> None:
    slow, onset, extra = draw(seed)
    run = job(seed, slow, onset, extra, "forward")
    paused: Extra = lambda rank, step: {  # noqa: E731
        "gc_ns": int(extra * 0.9 * MS) if rank == slow and step >= onset else MS
    }
    finding = the_straggler(run.items(extra=paused), slow)
    assert finding.kind == "garbage_collection"
    assert "gc.freeze" in finding.next
    everywhere: Extra = lambda rank, step: {"gc_ns": int(extra * MS)}  # noqa: E731
    assert the_straggler(run.items(extra=everywhere), slow).kind == "slow_compute"


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_without_a_processor_by_run_delay(seed: int) -> None:
    slow, onset, extra = draw(seed)
    run = job(seed, slow, onset, extra, "forward")
    onset_ms = run.ranks[slow].steps[onset - 1]["started"]
    share = extra / (STEP_MS + extra)
    held = process_samples(run, lambda rank, ms: share * (rank == slow and ms >= onset_ms) + 0.02)
    finding = the_straggler([*run.items(), *held], slow)
    assert finding.kind == "host_contention"
    assert finding.next_command.startswith("ps ")
    calm = process_samples(run, lambda rank, ms: 0.02)
    assert the_straggler([*run.items(), *calm], slow).kind == "slow_compute"


@pytest.mark.parametrize(
    ("before", "now", "others", "kind"),
    [
        (8, 1, 8, "cpu_pinning"),  # taskset on a job that runs, or another cpuset
        (8, 4, 8, "cpu_pinning"),
        (8, 7, 8, "host_contention"),  # one processor less is no reason to be slow
        (1, 1, 8, "host_contention"),  # it has always been so, and was as fast as they
        (8, 8, 8, "host_contention"),
    ],
)
def test_a_rank_that_may_use_few_processors(before: int, now: int, others: int, kind: str) -> None:
    slow, onset, extra = draw(12)
    run = job(12, slow, onset, extra, "forward")
    onset_ms = run.ranks[slow].steps[onset - 1]["started"]
    held = process_samples(  # its threads wait for each other: the delay alone would blame others
        run,
        lambda rank, ms: extra / (STEP_MS + extra) * (rank == slow and ms >= onset_ms) + 0.02,
        lambda rank, ms: (now if ms >= onset_ms else before) if rank == slow else others,
    )
    finding = the_straggler([*run.items(), *held], slow)
    assert finding.kind == kind
    if kind == "cpu_pinning":
        assert f"may use {now} processor" in finding.why
        assert "before 8" in finding.why


@pytest.mark.parametrize(("phase", "is_script"), [("other", True), ("forward", False)])
def test_time_between_the_phases_leads_to_the_script_first(phase: str, is_script: bool) -> None:
    slow, onset, extra = draw(4)
    finding = the_straggler(job(4, slow, onset, extra, phase).items(), slow)
    assert ("what the script does" in finding.next) == is_script


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_whose_container_has_used_up_its_processor_time(seed: int) -> None:
    slow, onset, extra = draw(seed)
    run = job(seed, slow, onset, extra, "forward")
    onset_ms = run.ranks[slow].steps[onset - 1]["started"]
    share = extra / (STEP_MS + extra)

    def limited(rank: int, ms: float) -> float:
        return share * (rank == slow and ms >= onset_ms)

    # what is not let run is not ready to run either: the delay says little
    held = process_samples(run, lambda rank, ms: 0.02, throttled=limited)
    finding = the_straggler([*run.items(), *held], slow)
    assert finding.kind == "cpu_limit"
    assert "limit of 0.4 processors was used up" in finding.why
    assert "limits.cpu" in finding.next
    everywhere = process_samples(run, lambda rank, ms: 0.02, throttled=lambda rank, ms: share)
    assert the_straggler([*run.items(), *everywhere], slow).kind == "slow_compute"


def test_a_rank_without_a_processor_by_switches_where_nothing_better_is_known() -> None:
    slow, onset, extra = draw(11)
    run = job(11, slow, onset, extra, "forward")

    def switched(rank: int, step: int) -> dict[str, int]:
        is_held = rank == slow and step >= onset
        return {"involuntary_switches": 80 if is_held else 3, "cpu_ns": 90 * MS}

    def busy(rank: int, step: int) -> dict[str, int]:
        row = switched(rank, step)
        return {**row, "cpu_ns": 170 * MS if row["involuntary_switches"] > 3 else 90 * MS}

    assert the_straggler(run.items(extra=switched), slow).kind == "host_contention"
    assert the_straggler(run.items(extra=busy), slow).kind == "slow_compute"


MODULE = (
    '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134 in forward\n'
)


def sampled(rank: int, line: int, inside: str = "") -> list[Item]:
    """Return stacks of a rank that is at one line of its script, in its last steps."""
    times = [START_NS + int((15_000 + 500 * number) * MS) for number in range(6)]
    text = f'{inside}  File "/job/train.py", line {line} in main'
    return [
        (time_ns, schema.Stacks(attempt=0, rank=rank, time_ns=time_ns, text=text))
        for time_ns in times
    ]


@pytest.mark.parametrize(
    ("phase", "line", "inside", "cpu_share", "is_own"),
    [
        ("other", 64, "", 0.0, True),
        ("other", 64, "", 1.0, True),  # it computes, but not what all do
        ("forward", 64, "", 0.0, True),  # it waits for a device, a pipe, a lock
        ("forward", 64, "", 1.0, False),  # a model without modules, slower, is like that
        ("forward", 64, MODULE, 0.0, False),  # the line of the model is evidence alone
        ("other", 60, "", 0.0, False),  # where the others are too
    ],
)
def test_code_that_only_one_rank_runs(
    phase: str, line: int, inside: str, cpu_share: float, is_own: bool
) -> None:
    slow, onset, extra_ms = draw(17)
    run = job(17, slow, onset, extra_ms, phase)

    def times(rank: int, step: int) -> dict[str, int]:
        more = cpu_share * extra_ms * (rank == slow and step >= onset)
        return {"cpu_ns": int((80 + more) * MS)}

    stacks = [*sampled(slow, line, inside), *sampled(0 if slow else 1, 60)]
    finding = the_straggler([*run.items(extra=times), *stacks], slow)
    assert finding.kind == "slow_compute"
    assert ("its script, outside of torch: in 6 of 6 stacks" in finding.why) == is_own
    assert ("what one rank prints" in finding.next) == is_own
    assert (".item()" in finding.would_be_wrong_if) == is_own
    is_apart = line == 64
    assert ("main (train.py:64)" in finding.next) == is_apart
    assert any("train.py:64" in one.text for one in finding.evidence) == is_apart


@pytest.mark.parametrize(("cpu_share", "is_own"), [(1.0, False), (0.0, True)])
def test_a_script_without_phases_that_computes_is_not_called_different(
    cpu_share: float, is_own: bool
) -> None:
    """Where most of the work of all is outside of any phase, other code is no evidence."""
    slow, onset, extra_ms = draw(18)
    noise = noisy(18, RANKS, STEPS, 0.05)

    def program(rank: int, step: int) -> list[Act]:
        late = extra_ms if rank == slow and step >= onset else 0.0
        return [
            Act("compute", 90 * noise[rank, step] + late, "other"),
            Act("issue", 3.0, "other"),
            Act("wait", phase="other"),
        ]

    def times(rank: int, step: int) -> dict[str, int]:
        more = cpu_share * extra_ms * (rank == slow and step >= onset)
        return {"cpu_ns": int((80 + more) * MS)}

    run = Timeline(RANKS, STEPS, program, {"world": tuple(range(RANKS))}).run()
    stacks = [*sampled(slow, 64), *sampled(0 if slow else 1, 60)]
    finding = the_straggler([*run.items(extra=times), *stacks], slow)
    assert ("its script, outside of torch" in finding.why) == is_own


@pytest.mark.parametrize("phase", ["forward", "data"])
@pytest.mark.parametrize(
    ("own_cpu_ms", "other_cpu_ms", "is_busy"),
    [
        (0.0, 1.0, True),  # shares of the excess: a thread beside it has all of that time
        (0.1, 0.8, True),
        (1.0, 3.0, False),  # it computes more, on four threads
        (0.0, 0.1, False),
        (0.0, 0.0, False),  # it sleeps
    ],
)
def test_a_thread_beside_the_one_that_trains(
    own_cpu_ms: float, other_cpu_ms: float, is_busy: bool, phase: str
) -> None:
    slow, onset, extra_ms = draw(14)
    run = job(14, slow, onset, extra_ms, phase)

    def times(rank: int, step: int) -> dict[str, int]:
        more = extra_ms * (rank == slow and step >= onset)
        own, others = 90 + own_cpu_ms * more, 200 + other_cpu_ms * more
        return {"cpu_ns": int(own * MS), "process_cpu_ns": int((own + others) * MS)}

    finding = the_straggler(run.items(extra=times), slow)
    plain = "slow_data" if phase == "data" else "slow_compute"
    assert finding.kind == ("busy_thread" if is_busy else plain)
    if is_busy:
        assert "interpreter lock" in finding.why


@pytest.mark.parametrize(("mhz", "bits", "kind"), [
    (1100, 0, "thermal_or_power"), (1700, 0x40, "thermal_or_power"), (1700, 0, "slow_compute"),
    (1690, 0x1, "slow_compute"),
])  # fmt: skip
def test_a_gpu_that_is_held_down(mhz: int, bits: int, kind: str) -> None:
    slow, onset, extra = draw(21)
    run = job(21, slow, onset, extra, "forward")
    onset_ms = run.ranks[slow].steps[onset - 1]["started"]
    samples = gpu_samples(
        run, lambda rank, ms: (mhz, bits) if rank == slow and ms >= onset_ms else (1700, 0)
    )
    finding = the_straggler([*run.items(), *samples], slow)
    assert finding.kind == kind
    if bits == 0x40:
        assert "thermal slowdown (hardware)" in finding.why


def test_pages_that_are_not_in_memory() -> None:
    slow, onset, extra = draw(31)
    run = job(31, slow, onset, extra, "data")
    faults: Extra = lambda rank, step: {  # noqa: E731
        "major_faults": 12 if rank == slow and step >= onset else 0
    }
    assert the_straggler(run.items(extra=faults), slow).kind == "page_cache"
    assert the_straggler(run.items(), slow).kind == "slow_data"


@pytest.mark.parametrize("more", [True, False])
def test_longer_sequences_are_more_work_and_no_fault(more: bool) -> None:
    slow, onset, extra = draw(61)
    run = job(61, slow, onset, extra, "forward")

    def tokens(rank: int, step: int) -> float:
        is_long = more and rank == slow and step >= onset
        return 4096.0 * (1 + extra / STEP_MS * is_long)

    said: list[Item] = [
        (START_NS, schema.Metrics(
            attempt=0, rank=rank, time_ns=START_NS + step, step=step,
            values={"tokens": tokens(rank, step)},
        ))
        for rank in range(RANKS)
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    look = look_at([*run.items(), *said])
    (finding,) = (f for f in look.findings if f.detector == "straggler")
    assert finding.kind == ("sequence_imbalance" if more else "slow_compute")
    assert (look.verdict is None) == more
    if more:
        times = f"{1 + extra / STEP_MS:.1f}\N{MULTIPLICATION SIGN}"
        what = f"was given {times} as many tokens as its {RANKS - 1} peers since step {onset}"
        assert finding.what.endswith(what)


@pytest.mark.parametrize("more", [True, False])
def test_more_microbatches_are_more_work_and_no_fault(more: bool) -> None:
    slow, onset, _ = draw(62)
    run = job(62, slow, onset, 0.5 * STEP_MS, "forward")
    passes: Extra = lambda rank, step: {  # noqa: E731
        "microbatches": 3 if more and rank == slow and step >= onset else 2
    }
    look = look_at(run.items(extra=passes))
    (finding,) = (f for f in look.findings if f.detector == "straggler")
    assert finding.kind == ("sequence_imbalance" if more else "slow_compute")
    assert (look.verdict is None) == more
    if more:
        times = "1.5\N{MULTIPLICATION SIGN} as many microbatches"
        assert finding.what.endswith(
            f"was given {times} as its {RANKS - 1} peers since step {onset}"
        )
        assert "through 3.0 microbatches a step, its reference through 2.0" in finding.why


@pytest.mark.parametrize(
    ("extra_share", "cpu_share", "said"),
    [
        (0.6, 0.05, "its CPU time is the same (84.0 ms against 80.0 ms), so it is held up"),
        (0.14, 0.12, "its CPU time is 1.1 times as long"),
        (0.6, 0.5, "its CPU time is 1.5 times as long"),
    ],
)
def test_cpu_time_is_the_same_only_beside_how_much_longer_the_step_is(
    extra_share: float, cpu_share: float, said: str
) -> None:
    slow, onset, _ = draw(71)
    run = job(71, slow, onset, extra_share * STEP_MS, "forward")
    busy: Extra = lambda rank, step: {  # noqa: E731
        "cpu_ns": int(80 * MS * (1 + cpu_share * (rank == slow and step >= onset)))
    }
    finding = the_straggler(run.items(extra=busy), slow)
    assert said in finding.why
    assert ("More work to do" in " ".join(finding.ruled_out)) == ("the same" in said)


def test_the_ratio_said_is_that_of_both_times_said() -> None:
    for seed in range(6):
        slow, onset, extra = draw(seed)
        finding = the_straggler(job(seed, slow, onset, extra, "forward").items(), slow)
        mine, usual = (
            float(ms)
            for ms in re.findall(r"works ([\d.]+) ms .*? against ([\d.]+) ms", finding.why)[0]
        )
        said = float(re.findall(r"is ([\d.]+)\N{MULTIPLICATION SIGN} slower", finding.what)[0])
        assert abs(said - mine / usual) <= 0.05 + 1.0 / usual, finding.what


def test_the_key_stays_when_the_kind_becomes_known() -> None:
    slow, onset, extra = draw(41)
    run = job(41, slow, onset, extra, "forward")
    held = process_samples(run, lambda rank, ms: 0.4 * (rank == slow))
    keys = {the_straggler([*run.items(), *more], slow).key for more in ([], held)}
    assert len(keys) == 1


def test_samples_in_any_order_and_twice() -> None:
    slow, onset, extra = draw(51)
    run = job(51, slow, onset, extra, "forward")
    items = [*run.items(), *process_samples(run, lambda rank, ms: 0.5 * (rank == slow))]
    plain = look_at(items).findings
    state = RunState("run")
    apply(state, spoil(items, seed=2, lost=0.0))
    spoilt = state.look(START_NS + 10**12).findings
    assert [f.kind for f in plain] == [f.kind for f in spoilt]


def test_a_counter_that_began_anew_proves_nothing() -> None:
    table = SampleTable()
    columns: dict[str, Column] = {
        name: np.zeros(6, np.int64) for name in schema.CHUNK_COLUMNS["process"]
    }
    columns["time_ns"] = np.arange(6) * 10**9
    columns["run_delay_us_total"] = np.array([0, 100, 200, 0, 100, 200])
    table.add("a", "process", columns)
    assert table.run_delay_ratio(0, 0, 10**10) is None
    assert table.run_delay_ratio(0, 0, 2 * 10**9) == pytest.approx(1e-4)
    assert table.run_delay_ratio(1, 0, 10**10) is None


@pytest.mark.parametrize(
    ("burn_ms", "delay", "lead"),
    [
        (30.0, 0.0, "Look first at what the other threads of rank 3 do since step"),
        (0.0, 0.25, "had no processor: see what else runs on node-0 since step"),
        (0.0, 0.0, "Look at what all ranks share and changed at step"),
    ],
)
def test_what_changed_when_all_ranks_became_slower(burn_ms: float, delay: float, lead: str) -> None:
    """One rank's thread, or another job, takes processors that all ranks of a host share."""
    noise, slow_ms, onset = noisy(23, RANKS, 2 * STEPS, 0.02), 30.0, STEPS

    def program(rank: int, step: int) -> list[Act]:
        return [
            Act("compute", 90 * noise[rank, step] + slow_ms * (step >= onset), "forward"),
            Act("issue", 3.0, "backward"),
            Act("wait", phase="backward"),
        ]

    def times(rank: int, step: int) -> dict[str, int]:
        more = burn_ms * (rank == 3 and step >= onset)
        return {"cpu_ns": 90 * MS, "process_cpu_ns": int((110 + more) * MS)}

    run = Timeline(RANKS, 2 * STEPS, program, {"world": tuple(range(RANKS))}).run()
    onset_ms = run.ranks[0].steps[onset - 1]["started"]
    held = process_samples(run, lambda rank, ms: delay * (ms >= onset_ms) + 0.02)
    look = look_at([*run.items(extra=times), *held])
    (found,) = [f for f in look.findings if f.kind == "slowdown"]
    assert found.onset_step == onset
    assert lead in found.next
    assert not found.ranks  # a lead, not an accusation
    assert not [f for f in look.findings if f.detector == "straggler" and f.severity != "info"]
