"""Hangs of 1,024 to 8,192 ranks in nested groups: exact roots, within a second (simulation)."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from rankscope.files.flight_recorder import Dump, FlightEntry
from rankscope.importers.flight_records import convert
from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.diagnose.hang.detector import Hang
from rankscope_server.findings.finding import DetectorResult
from tests.analysis.simulator import say
from tests.simulator.job import Fault, Job, Point
from tests.simulator.records import MS, START_NS, Recording

POINTS: tuple[Point, ...] = ("data", "forward", "backward", "gradients", "norm")
SHAPES = {
    1024: [(16, 8, 8), (128, 8, 1), (32, 4, 8), (64, 1, 16), (1024, 1, 1)],
    4096: [(64, 8, 8)],
    8192: [(64, 8, 16)],
}


def job_with_roots(num_ranks: int, seed: int) -> Job:
    """Return a job in which one to three ranks hang in the same step, each somewhere else."""
    chance = random.Random(f"{num_ranks} {seed}")
    data, tensor, pipeline = SHAPES[num_ranks][seed % len(SHAPES[num_ranks])]
    points = [p for p in POINTS if p != "norm" or pipeline * tensor > 1]
    faults = tuple(
        Fault("hang", rank, 3, point=chance.choice(points), microbatch=chance.randrange(2))
        for rank in chance.sample(range(num_ranks), chance.randint(1, 3))
    )
    return Job(data=data, tensor=tensor, pipeline=pipeline, steps=4, microbatches=2, buckets=2,
               seed=seed, faults=faults)  # fmt: skip


def look(job: Job) -> tuple[DetectorResult, float, set[int]]:
    """Return what the detector says, how long it took, and which ranks did stop by themselves."""
    recording = Recording(job, collectives=False)
    state = AttemptState("scale", 0)
    for _, what in recording.items():
        if isinstance(what, tuple):
            state.apply_chunk(*what)
        else:
            state.apply_record(what)
    at_ms = recording.stopped_ms() + 40_000
    for _, record in recording.states(at_ms):
        state.apply_record(record)  # type: ignore[arg-type]
    window = state.window(START_NS + int(at_ms * MS))
    began = time.process_time()
    result = Hang().look(window)
    return result, time.process_time() - began, stopped(recording, job)


def stopped(recording: Recording, job: Job) -> set[int]:
    """Return the roots that came to where they hang; another may have held them up before."""
    return {fault.rank for fault in job.faults if fault.rank in recording.hung}


@pytest.mark.parametrize(("num_ranks", "rounds"), [(1024, 6), (4096, 1), (8192, 1)])
def test_one_to_three_roots_are_named_exactly(num_ranks: int, rounds: int) -> None:
    exact, slowest = 0, 0.0
    for seed in range(rounds):
        job = job_with_roots(num_ranks, seed)
        result, took, roots = look(job)
        named = {rank for finding in result.findings for rank in finding.ranks}
        assert named <= roots, (seed, named - roots, job.faults)
        exact += named == roots
        slowest = max(slowest, took)
        victims = {rank for finding in result.findings for rank in finding.victims}
        assert named != roots or victims == set(range(num_ranks)) - roots, (seed, job.faults)
    say(f"hang among {num_ranks}: {exact} of {rounds} exact, slowest look {slowest:.2f} s")
    assert exact >= 0.99 * rounds
    assert slowest <= 1.0


def dump_of(rank: int, hung: int, entries: int = 220) -> Dump:
    """Return the dump of a rank of 128 x 8: ten all_reduces of its tensor group to one of its data.

    The tensor group of `hung` is stuck in its first pending one, because that rank has issued none;
    all others wait in the first pending one over the data group.
    """
    tensor, data = (rank // 8, tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))), rank % 8
    stuck = rank // 8 == hung // 8
    found, numbers = [], {"tp": 100, "dp": 10}
    config = {
        f"{tensor[0]}": {"name": f"{tensor[0]}", "desc": "TP", "ranks": str(list(tensor[1]))},
        f"{1000 + data}": {
            "name": f"{1000 + data}", "desc": "DP", "ranks": str(list(range(data, 1024, 8))),
        },
    }  # fmt: skip
    for place in range(entries):
        kind = "dp" if place % 11 == 10 else "tp"
        numbers[kind] += 1
        if rank == hung:
            continue
        done = not stuck and place < 10
        found.append(FlightEntry(
            record_id=place, pg_id=1 if kind == "tp" else 2,
            process_group=(f"{tensor[0]}", "TP") if kind == "tp" else (f"{1000 + data}", "DP"),
            collective_seq_id=numbers[kind], p2p_seq_id=0, profiling_name="nccl:all_reduce",
            time_created_ns=START_NS + place * MS, state="completed" if done else "scheduled",
            retired=done, is_p2p=False, input_sizes=[[1024]], input_dtypes=["Float"],
            output_sizes=[[1024]], output_dtypes=["Float"], timeout_ms=600_000,
        ))  # fmt: skip
    sent = {"tp": 100, "dp": 10} if rank == hung else numbers
    ended = {"tp": 100 if stuck else 110, "dp": 10}
    status: dict[str, dict[str, str | int]] = {
        str(number): {
            "last_enqueued_collective": sent[kind], "last_started_collective": -1,
            "last_completed_collective": ended[kind],
        }
        for number, kind in ((1, "tp"), (2, "dp"))
    }  # fmt: skip
    return Dump(version="2.10", pg_config=config, pg_status=status, entries=found)


def test_the_dumps_of_a_thousand_ranks_with_220_pending_entries_name_one_rank() -> None:
    for hung in (0, 619):
        dumps = {rank: dump_of(rank, hung) for rank in range(1024)}
        began = time.process_time()
        found = convert(dumps)
        converted = time.process_time()
        state = AttemptState("dumps", 0)
        for record in found.records:
            state.apply_record(record)  # type: ignore[arg-type]
        window = state.window(found.records[-1].time_ns)
        applied = time.process_time()
        result = Hang().look(window)
        took = time.process_time() - applied
        say(
            f"1,024 dumps x 220 entries: converted in {converted - began:.1f} s, applied in "
            f"{applied - converted:.2f} s, wait-for graph in {took:.2f} s"
        )
        assert [finding.ranks for finding in result.findings] == [(hung,)]
        assert len(result.findings[0].victims) == 1023
        assert took < 0.5


def test_shifted_clocks_scaled_times_and_relabelled_groups_change_nothing() -> None:
    for seed in range(4):
        job = job_with_roots(1024, seed)
        job = dataclasses.replace(job, data=8, tensor=2, pipeline=2, faults=(
            dataclasses.replace(job.faults[0], rank=job.faults[0].rank % 32),))  # fmt: skip
        noise = dataclasses.replace(job.noise, clock_offset_ms=200.0, clock_drift_ppm=50.0)
        shifted = dataclasses.replace(job, noise=noise)
        scaled = dataclasses.replace(
            job, forward_ms=60.0, data_ms=3.0, optimizer_ms=9.0, transfer_ms=3.0
        )
        found = [[f.ranks for f in look(one)[0].findings] for one in (job, shifted, scaled)]
        assert found[0] == found[1] == found[2] == [(job.faults[0].rank,)], seed
