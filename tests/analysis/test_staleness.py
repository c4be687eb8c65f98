"""Staleness: exact counts on a toy parameter server and a toy pipeline, hot shards, backups."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look
from tests.analysis.records import registered
from tests.analysis.simulator import START_NS

Stamp = tuple[int, int, int, int, int]  # worker, its step, version read, backward, applied


def parameter_server(
    num_workers: int, gradients: int, seed: int, slow: dict[int, float] | None = None
) -> list[Stamp]:
    """Run an asynchronous server: pull, compute for a while, push; one version per push."""
    chance = random.Random(seed)
    version = 0
    steps = [0] * num_workers
    due: list[tuple[float, int, int]] = []

    def begin(now: float, worker: int) -> None:
        took = chance.uniform(0.95, 1.05) * (slow or {}).get(worker, 1.0)
        heapq.heappush(due, (now + took, worker, version))

    for worker in range(num_workers):
        begin(worker * 0.01, worker)
    found: list[Stamp] = []
    while len(found) < gradients:
        now, worker, read = heapq.heappop(due)
        steps[worker] += 1
        found.append((worker, steps[worker], read, read, version))
        version += 1
        begin(now, worker)
    return found


def pipeline(num_stages: int, microbatches: int, *, stashing: bool) -> list[Stamp]:
    """Run 1F1B without flushes: stage i has p - i microbatches in flight, each updates weights."""
    found: list[Stamp] = []
    for stage in range(num_stages):
        in_flight = num_stages - stage
        version, read = 0, {}
        forward = 0
        for backward in range(microbatches):
            while forward < min(backward + in_flight, microbatches):
                read[forward] = version
                forward += 1
            used = read[backward] if stashing else version
            found.append((stage, backward + 1, read[backward], used, version))
            version += 1
    return found


def state_of(
    stamps: list[Stamp], bound: int | None = None, extra: dict[str, float] | None = None
) -> RunState:
    state = RunState("run")
    workers = {stamp[0] for stamp in stamps}
    for rank in workers:
        state.apply_record(registered(rank, len(workers), host="a"))
    for worker, step, read, backward, applied in stamps:
        values = {
            "version_read": float(read), "version_backward": float(backward),
            "version_applied": float(applied), **(extra or {}),
        }  # fmt: skip
        if bound is not None:
            values["staleness_bound"] = bound
        state.apply_record(schema.Metrics(
            attempt=0, rank=worker, time_ns=START_NS + step, step=step, values=values,
        ))  # fmt: skip
    return state


def of(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == "staleness"]


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[max(0, int(np.ceil(share * len(values))) - 1)]


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_exact(seed: int) -> None:
    stamps = parameter_server(6, 1200, seed, {2: 3.0})
    (finding,) = of(state_of(stamps, bound=10).look(START_NS + 10**9))
    ages = {w: [s[4] - s[2] for s in stamps if s[0] == w] for w in range(6)}
    assert finding.ranks == tuple(w for w in range(6) if max(ages[w]) > 10)
    worst = max(ages, key=lambda w: (quantile(ages[w], 0.95), np.mean(ages[w])))
    assert worst == 2
    expected = (
        f"median {quantile(ages[2], 0.5)}, p95 {quantile(ages[2], 0.95)}, most {max(ages[2])}"
    )
    assert expected in finding.why
    assert finding.severity == "critical"


@pytest.mark.parametrize("seed", range(10))
def test_equal_workers_are_as_stale_as_they_should_be(seed: int) -> None:
    stamps = parameter_server(8, 1600, seed)
    ages = [applied - read for _, _, read, _, applied in stamps]
    assert np.mean(ages) == pytest.approx(7, abs=0.2)
    assert of(state_of(stamps, bound=-1).look(START_NS + 10**9)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_delay_makes_that_worker_stale_and_no_other(seed: int) -> None:
    stamps = parameter_server(8, 1600, seed, {3: 2.5})
    (finding,) = of(state_of(stamps).look(START_NS + 10**9))
    assert (finding.ranks, finding.severity) == ((3,), "warning")


def test_synchronous_means_zero() -> None:
    clean = [(w, s, s, s, s) for w in range(4) for s in range(1, 100)]
    assert of(state_of(clean, bound=0).look(START_NS)) == []
    one = [*clean, (2, 100, 99, 99, 100)]
    (finding,) = of(state_of(one, bound=0).look(START_NS))
    assert (finding.ranks, finding.severity, finding.onset_step) == ((2,), "critical", 100)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_pipeline_with_and_without_stashing(num_stages: int) -> None:
    stashed = pipeline(num_stages, 100, stashing=True)
    for stage in range(num_stages):  # PipeDream: stage i of p reads weights p - 1 - i versions old
        ages = [s[4] - s[2] for s in stashed if s[0] == stage and s[1] > num_stages]
        assert set(ages) == {num_stages - 1 - stage}
    assert of(state_of(stashed, bound=num_stages).look(START_NS)) == []
    (finding,) = of(state_of(pipeline(num_stages, 100, stashing=False),
                             bound=num_stages).look(START_NS))  # fmt: skip
    assert finding.key.endswith("mismatch")
    assert finding.ranks == tuple(range(num_stages - 1))  # the last stage has none in flight


def test_no_stamps_say_how_to_give_them() -> None:
    look = RunState("run")
    look.apply_record(registered(0, 2, host="a", pid=1))
    status = {detector.name: detector for detector in look.look(START_NS).detectors}["staleness"]
    assert (status.state, status.reason) == ("skipped", "no version stamps")
    assert "log_metrics" in status.remedy


def shards(hot: float, queue: float) -> list[Finding]:
    extra = {f"shard_{k}_requests": 100.0 * (hot if k == 1 else 1) for k in range(4)}
    extra |= {f"shard_{k}_bytes": 1e6 * (3 if k == 1 else 1) for k in range(4)}
    extra |= {f"shard_{k}_queue_seconds": queue if k == 1 else 0.0 for k in range(4)}
    state = state_of([(w, s, s, s, s) for w in range(4) for s in range(1, 50)], 0, extra)
    for rank in range(4):
        columns = {name: np.zeros(100, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, 101)
        columns["duration_ns"] = np.full(100, 10**9)
        state.apply_chunk(
            schema.Chunk(kind="steps", attempt=0, rank=rank, host="", count=100, time_lo_ns=1,
                         time_hi_ns=2, data=str(rank).encode()),
            dict(columns),
        )  # fmt: skip
    return of(state.look(START_NS))


def test_a_hot_shard_counts_where_workers_wait_for_it() -> None:
    (finding,) = shards(hot=5.0, queue=10.0)
    assert (finding.kind, finding.severity) == ("hot_shard", "warning")
    assert finding.cost_throughput_ratio == pytest.approx(0.10)
    assert "62 %" in finding.what
    assert "2.0 times the mean bytes" in finding.why
    assert shards(hot=5.0, queue=0.1) == []  # nobody waits
    assert shards(hot=1.5, queue=10.0) == []  # no more than twice its share


def test_of_two_shards_one_may_be_hot() -> None:
    def told(rank: int, shard: int, moved: float) -> schema.Metrics:
        values = {f"shard_{shard}_requests": 200.0, f"shard_{shard}_bytes": moved}
        return schema.Metrics(attempt=0, rank=rank, time_ns=START_NS + 1, step=100, values=values)

    state = state_of([(0, 1, 0, 0, 0), (1, 1, 0, 0, 0)])
    for record in (told(2, 0, 8e9), told(3, 1, 1e9)):
        state.apply_record(record)
    (finding,) = of(state.look(START_NS + 10**9))
    assert (finding.kind, finding.ranks, finding.severity) == ("hot_shard", (), "info")
    assert "89 % of all bytes" in finding.what


@pytest.mark.parametrize("seed", range(3))
def test_order_doubling_and_other_ranks(seed: int) -> None:
    chance = random.Random(seed)
    stamps = parameter_server(5, 1000, seed, {4: 3.0})
    (plain,) = of(state_of(stamps, 3).look(START_NS))
    mixed = stamps + chance.sample(stamps, 300)
    chance.shuffle(mixed)
    (other,) = of(state_of(mixed, 3).look(START_NS))
    assert other == plain
    renamed = [((w + 1) % 5, *rest) for w, *rest in stamps]
    (other,) = of(state_of(renamed, 3).look(START_NS))  # type: ignore[arg-type]
    assert sorted(other.ranks) == sorted((w + 1) % 5 for w in plain.ranks)
