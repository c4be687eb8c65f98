"""Faults that slow, bloat or misconfigure a run really do: manifest and raw record of one run.

The run has many faults, each on its own rank and steps, so that starting ranks is paid for once.
The record is `recorded_trainer.py`'s; sizes are far above what a busy machine adds to a step.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import capabilities
from tests.trainer.launch import RECORDED_TRAINER, Finished, run

STEPS = 48
FAULTS = (
    "slow_forward:rank=1,start=4,steps=3,size=300ms",
    "slow_backward:rank=1,start=8,steps=3,size=300ms",
    "slow_compute:rank=1,start=12,steps=3,size=300ms",
    "hiccup:rank=1,start=16,steps=6,size=400ms",
    "gc_pause:rank=1,start=23,steps=4",
    "contention:rank=1,start=28,steps=4,size=2",
    "version_drift:rank=1",
    "memory_leak:rank=0,start=5,steps=10,size=4MiB",
    "environment_drift:rank=0",
    "slow_epoch_start:rank=0,start=1,size=400ms",
    "bad_shard:rank=0,start=30,steps=10,size=50ms",
    "corrupt_batch:rank=1,start=40,steps=2,size=5",
    "slow_checkpoint:rank=1,start=32,steps=1,size=700ms",
    "rare_checkpoint:size=2",
)
CLOCKS = (
    "clock_offset:rank=1,start=34,steps=4,size=2s",
    "clock_drift:rank=0,start=41,steps=6,size=100000ppm",
)  # which are built from C
pytestmark = pytest.mark.multiproc


def faults() -> tuple[str, ...]:
    return FAULTS if capabilities.lacks("compiler") else FAULTS + CLOCKS


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("faults")
    arguments = ["--steps", str(STEPS), "--data-bytes", "10000"]
    arguments += ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "8"]
    for fault in faults():
        arguments += ["--fault", fault]
    ended = run(folder, 2, *arguments, program=RECORDED_TRAINER)
    assert ended.code == 0, ended.output
    return ended


def _manifest(finished: Finished, name: str, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lines = [x for x in finished.manifest() if (x["fault"], x["rank"]) == (name, rank)]
    begin, end = lines
    assert begin["start_time_ns"] < end["end_time_ns"]
    return begin, end


def _steps(begin: dict[str, Any], end: dict[str, Any]) -> tuple[int, int, int]:
    return begin["start_step"], end["end_step"], end["fired"]


def test_nothing_else_fired(finished: Finished) -> None:
    names = {fault.partition(":")[0] for fault in faults()}
    assert {line["fault"] for line in finished.manifest()} == names


def test_slow_forward_is_slow_in_the_forward(finished: Finished) -> None:
    begin, end = _manifest(finished, "slow_forward", 1)
    assert _steps(begin, end) == (4, 6, 6)
    assert begin["size"] == "300ms"
    record = finished.record(1)
    assert all(record[step]["forward"] >= 0.3 for step in (4, 5, 6))


def test_slow_backward_is_slow_in_the_backward(finished: Finished) -> None:
    begin, end = _manifest(finished, "slow_backward", 1)
    assert _steps(begin, end) == (8, 10, 6)
    record = finished.record(1)
    assert all(record[step]["backward"] >= 0.3 for step in (8, 9, 10))


def test_slow_compute_is_slow_in_both_and_more_in_the_backward(finished: Finished) -> None:
    begin, end = _manifest(finished, "slow_compute", 1)
    assert _steps(begin, end) == (12, 14, 12)
    record = finished.record(1)
    assert all(record[step]["forward"] >= 0.1 for step in (12, 13, 14))
    assert all(record[step]["backward"] >= 0.2 for step in (12, 13, 14))


@pytest.mark.core
def test_a_hiccup_stalls_some_steps_and_leaves_the_others(finished: Finished) -> None:
    begin, end = _manifest(finished, "hiccup", 1)
    assert begin["start_step"] == 16
    assert end["stalled_seconds"] == pytest.approx(0.4 * end["fired"])
    record = finished.record(1)
    stalled = [step for step in range(16, 22) if record[step]["forward"] >= 0.4]
    assert stalled[0] == 16
    assert 1 <= end["fired"] < 6
    assert len(stalled) >= end["fired"]


def test_a_gc_pause_collects_real_garbage(finished: Finished) -> None:
    begin, end = _manifest(finished, "gc_pause", 1)
    assert _steps(begin, end) == (23, 26, 2)
    assert end["collected"] >= 600_000
    record = finished.record(1)
    for step in (23, 26):
        assert record[step]["collected"] >= 300_000
        assert record[step]["collection"] >= 0.01
    assert sum(record[step].get("collected", 0) for step in (24, 25)) < 100_000


def test_contention_runs_busy_processes_on_the_core_of_the_rank(finished: Finished) -> None:
    begin, end = _manifest(finished, "contention", 1)
    assert _steps(begin, end) == (28, 31, 4)
    record = finished.record(1)
    for step in (28, 31):
        (core,) = record[step]["cores"]
        assert core == end["core"]
        assert [child["cores"] for child in record[step]["children"]] == [[core], [core]]
    assert sum(child["cpu_seconds"] for child in record[31]["children"]) > 0
    assert record[32]["cores"] == record[27]["cores"]
    assert record[32]["children"] == []


@pytest.mark.needs("compiler")
def test_a_wrong_clock_is_wrong_for_as_long_as_the_fault_lasts(finished: Finished) -> None:
    begin, end = _manifest(finished, "clock_offset", 1)
    assert _steps(begin, end) == (34, 37, 4)
    record = finished.record(1)
    wrong = {step: record[step]["wall_minus_monotonic_ms"] for step in record}
    assert all(abs(wrong[step] - 2000) < 500 for step in range(34, 38))
    assert all(abs(wrong[step]) < 500 for step in (*range(1, 34), *range(38, STEPS + 1)))
    # The manifest's own times are true: the fault did not last for two seconds more.
    lasted = (end["end_time_ns"] - begin["start_time_ns"]) / 1e9
    assert lasted < record[38]["seconds"] - record[33]["seconds"]


@pytest.mark.needs("compiler")
def test_a_clock_that_runs_fast_is_more_wrong_with_each_step(finished: Finished) -> None:
    begin, end = _manifest(finished, "clock_drift", 0)
    assert _steps(begin, end) == (41, 46, 6)
    record = finished.record(0)
    passed_ms = (record[46]["seconds"] - record[41]["seconds"]) * 1000
    wrong = [record[step]["wall_minus_monotonic_ms"] for step in (41, 46, 47)]
    assert wrong[1] - wrong[0] == pytest.approx(0.1 * passed_ms, rel=0.2, abs=1.0)
    assert abs(wrong[2]) < 500


def test_another_version_of_a_library_is_really_loaded(finished: Finished) -> None:
    begin, end = _manifest(finished, "version_drift", 1)
    assert begin["start_step"] == 0
    drifted, healthy = finished.record(1)[5]["filelock"], finished.record(0)[5]["filelock"]
    assert (end["loaded"], end["installed"]) == (drifted, healthy)
    assert drifted != healthy


def test_a_variable_differs_on_one_rank(finished: Finished) -> None:
    _, end = _manifest(finished, "environment_drift", 0)
    assert end["variable"] == "NCCL_PROTO"
    assert finished.record(0)[5]["NCCL_PROTO"] == end["value"]
    assert finished.record(1)[5]["NCCL_PROTO"] is None


def test_a_leak_grows_the_memory_of_one_rank(finished: Finished) -> None:
    begin, end = _manifest(finished, "memory_leak", 0)
    assert _steps(begin, end) == (5, 14, 10)
    assert end["leaked_mib"] == 40
    grown = [
        finished.record(rank)[15]["rss_mib"] - finished.record(rank)[5]["rss_mib"]
        for rank in (0, 1)
    ]
    assert grown[0] - grown[1] > 30
    assert finished.record(0)[40]["rss_mib"] - finished.record(0)[5]["rss_mib"] > 30


def test_the_first_batch_of_each_epoch_is_slow(finished: Finished) -> None:
    begin, end = _manifest(finished, "slow_epoch_start", 0)
    # 281 windows, of which a step takes 16: an epoch has 17 steps.
    assert _steps(begin, end) == (1, 35, 3)
    record = finished.record(0)
    assert all(record[step]["data"] >= 0.4 for step in (1, 18, 35))


def test_a_bad_shard_is_slow_where_it_is_drawn(finished: Finished) -> None:
    _, end = _manifest(finished, "bad_shard", 0)
    assert 30 <= end["end_step"] <= 39
    assert 1 <= end["fired"] < 40  # of 80 windows
    assert end["slow_seconds"] == pytest.approx(0.05 * end["fired"])
    record = finished.record(0)
    slow = [record[step]["data"] for step in range(30, 40) if record[step]["data"] >= 0.05]
    assert sum(slow) >= end["slow_seconds"]


def test_a_corrupt_batch_reaches_the_model_with_other_bytes(finished: Finished) -> None:
    begin, end = _manifest(finished, "corrupt_batch", 1)
    assert _steps(begin, end) == (40, 41, 2)
    assert end["changed_bytes"] == 10
    changed = {step: sums["changed_bytes"] for step, sums in finished.record(1).items()}
    assert [step for step in changed if changed[step]] == [40, 41]
    assert changed[40] == changed[41] == 5
    assert not any(sums["changed_bytes"] for sums in finished.record(0).values())


def test_a_slow_checkpoint_keeps_all_ranks(finished: Finished) -> None:
    begin, end = _manifest(finished, "slow_checkpoint", 1)
    assert _steps(begin, end) == (32, 32, 1)
    assert finished.record(1)[32]["checkpoint"] >= 0.7
    # The other one waits until it ends; what it was late for that, it spent in the same step.
    phases = ("data", "forward", "backward", "optimizer", "checkpoint")
    waiting = {name: finished.record(0)[32].get(name, 0.0) for name in phases}
    assert max(waiting, key=waiting.__getitem__) == "checkpoint"
    assert sum(waiting.values()) >= 0.7


def test_checkpoints_are_rarer_than_the_settings_say(finished: Finished) -> None:
    for rank in (0, 1):
        begin, end = _manifest(finished, "rare_checkpoint", rank)
        assert (begin["start_step"], end["checkpoint_every"]) == (0, 16)
        record = finished.record(rank)
        assert [step for step in record if "checkpoints" in record[step]] == [16, 32, 48]
    assert sorted(path.name for path in (finished.folder / "checkpoints").glob("step-*")) == [
        "step-00000032", "step-00000048"
    ]  # fmt: skip
