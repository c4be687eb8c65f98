"""Planted leaks, staircases, plateaus and leak-free runs: who grows, and when memory is full."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.trends import kendall_p, theil_sen
from rankscope_server.observe.memory_table import MemoryTable
from tests.analysis.records import registered
from tests.analysis.simulator import MS, START_NS

MIB, GIB = float(1 << 20), float(1 << 30)
Shape = Callable[[int, np.random.Generator], float]


def series(seed: int, ranks: int, steps: int, shape: dict[int, Shape], noise: float = 3 * MIB):
    """Yield (rank, step, bytes) of a job: warm-up, noise of batches, and what `shape` adds."""
    chance = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            base = 2 * GIB + min(step, 30) * 10 * MIB
            base += noise * abs(chance.normal())
            extra = shape[rank](step, chance) if rank in shape else 0.0
            yield rank, step, base + extra


def state_of(
    rows: list[tuple[int, int, float]],
    name: str = "rss_bytes",
    limit: float = 16 * GIB,
    step_ms: float = 500.0,
) -> RunState:
    state = RunState("run")
    ranks = sorted({rank for rank, _, _ in rows})
    for rank in ranks:
        state.apply_record(registered(rank, len(ranks), host=f"node-{rank}"))
        state.apply_record(schema.Environment(
            attempt=0, rank=rank, time_ns=START_NS, facts={"host.memory_bytes": str(int(limit))},
        ))  # fmt: skip
        last = max(step for _, step, _ in rows)
        columns = {name: np.zeros(last, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, last + 1)
        columns["duration_ns"] = np.full(last, int(step_ms * MS))
        columns["forward_ns"] = columns["duration_ns"]
        columns["started_ns"] = START_NS + columns["step"] * int(step_ms * MS)
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="", count=last, time_lo_ns=1, time_hi_ns=2,
            data=str(rank).encode(),
        )  # fmt: skip
        state.apply_chunk(chunk, dict(columns))
    for rank, step, value in rows:
        state.apply_record(schema.Metrics(
            attempt=0, rank=rank, time_ns=START_NS + step, step=step, values={name: value},
        ))  # fmt: skip
    return state


def found_in(state: RunState) -> list[Finding]:
    look = state.look(START_NS + 10**13)
    return [finding for finding in look.findings if finding.detector == "memory-growth"]


def steps_said(finding: Finding) -> float:
    return float(finding.what.split("in about ")[1].split(" steps")[0].replace(",", ""))


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_and_its_end_forecast_half_way(seed: int) -> None:
    chance = random.Random(seed)
    leak = chance.choice([1, 2, 5, 11, 25, 50]) * MIB
    onset, culprit = chance.choice([1, 60, 100, 150]), chance.randrange(4)
    full = onset + 400  # the step at which the memory is full
    limit = 2 * GIB + 300 * MIB + 400 * leak
    half = onset + 200
    shape = {culprit: lambda step, chance: max(0, step - onset) * leak}
    rows = list(series(seed, 4, half, shape))
    (finding,) = found_in(state_of(rows, limit=limit))
    assert finding.ranks == (culprit,)
    assert finding.kind == "memory_growth"
    assert finding.severity == "critical"
    assert steps_said(finding) == pytest.approx(full - half, rel=0.20)
    assert finding.onset_step is not None
    if onset >= 60:
        assert abs(finding.onset_step - onset) <= 25


def test_a_leak_of_one_rank_alone_is_no_cache_however_far_its_end() -> None:
    shape = {1: lambda step, chance: max(0, step - 80) * 4 * MIB}
    (finding,) = found_in(state_of(list(series(1, 4, 240, shape)), limit=24 * GIB))
    assert (finding.ranks, finding.severity) == ((1,), "warning")
    alike = {rank: shape[1] for rank in range(4)}
    (finding,) = found_in(state_of(list(series(1, 4, 240, alike)), limit=64 * GIB))
    assert finding.severity == "info"


def test_workers_that_leak_are_told_apart_from_their_rank() -> None:
    shape = {2: lambda step, chance: max(0, step - 80) * 8 * MIB}
    rows = list(series(1, 4, 240, shape))
    (finding,) = found_in(state_of(rows, name="workers_rss_bytes", limit=16 * GIB))
    assert finding.ranks == (2,)
    assert "loader workers" in finding.what


@pytest.mark.parametrize("seed", range(10))
def test_a_staircase_is_a_leak_per_epoch(seed: int) -> None:
    every = 40 + 10 * (seed % 5)
    shape = {1: lambda step, chance: step // every * 60 * MIB}
    rows = list(series(seed, 4, 6 * every + 20 + seed, shape, noise=MIB))
    (finding,) = found_in(state_of(rows))
    assert finding.ranks == (1,)
    assert "in jumps" in finding.why
    (said,) = re.findall(r"every (\d+) steps", finding.why)
    assert abs(int(said) - every) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_plateau_is_silent(seed: int) -> None:
    top = 30 + 8 * seed
    shape = {rank: lambda step, chance: min(step, 60 + top) * 8 * MIB for rank in range(4)}
    assert found_in(state_of(list(series(seed, 4, 256 + 60, shape)))) == []


def variable_lengths(step: int, chance: np.random.Generator) -> float:
    return float(chance.lognormal(0, 0.5)) * 200 * MIB


class HighWater:
    """The allocator keeps the largest batch it ever saw."""

    def __init__(self) -> None:
        self.most = 0.0

    def __call__(self, step: int, chance: np.random.Generator) -> float:
        self.most = max(self.most, variable_lengths(step, chance))
        return self.most


def sawtooth(step: int, chance: np.random.Generator) -> float:
    return step % 37 * 4 * MIB


def one_jump(step: int, chance: np.random.Generator) -> float:
    return 500 * MIB if step > 120 else 0.0


def cache(step: int, chance: np.random.Generator) -> float:
    return 900 * MIB * (1 - np.exp(-step / 60))


@pytest.mark.parametrize("seed", range(30))
def test_leak_free_runs_are_silent(seed: int) -> None:
    shapes = [variable_lengths, sawtooth, one_jump, cache]
    for steps in (120, 260, 600):
        shape: dict[int, Shape] = {rank: shapes[(seed + rank) % 4] for rank in range(4)}
        shape[seed % 4] = HighWater()
        found = found_in(state_of(list(series(seed, 4, steps, shape))))
        assert [finding for finding in found if finding.severity != "info"] == []


def test_the_ranks_of_a_host_fill_one_memory() -> None:
    shape: dict[int, Shape] = {rank: lambda step, chance: step * 5 * MIB for rank in range(4)}
    rows = list(series(3, 4, 250, shape))
    state = state_of(rows)
    for rank in range(4):  # all on one host
        state.apply_record(registered(rank, 4, time_ns=START_NS + 1))
    (finding,) = found_in(state)
    used = 4 * (2 * GIB + 300 * MIB + 250 * 5 * MIB)
    assert steps_said(finding) == pytest.approx((16 * GIB - used) / (20 * MIB), rel=0.1)
    assert finding.what.startswith("Every rank")


@pytest.mark.parametrize(
    ("of_files", "severity"), [(0.0, "critical"), (0.5, "critical"), (0.9, "info")]
)
def test_pages_of_files_are_no_leak(of_files: float, severity: str) -> None:
    grown = {1: lambda step, chance: step * 20 * MIB}
    state = state_of(list(series(3, 2, 250, grown)))
    for step in range(1, 251):
        state.apply_record(schema.Metrics(
            attempt=0, rank=1, time_ns=START_NS + step, step=step,
            values={"rss_file_bytes": 300 * MIB + of_files * step * 20 * MIB},
        ))  # fmt: skip
    (finding,) = found_in(state)
    assert finding.severity == severity
    assert ("mapped files" in finding.confidence_text) == (severity == "info")


def test_no_memory_is_skipped() -> None:
    look = RunState("run")
    look.apply_record(registered(0, 1, host="a", pid=1))
    status = {detector.name: detector for detector in look.look(START_NS + 1).detectors}[
        "memory-growth"
    ]
    assert (status.state, bool(status.remedy)) == ("skipped", True)


@pytest.mark.parametrize("seed", range(3))
def test_order_and_doubling_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    shape: dict[int, Shape] = {1: lambda step, chance: step * 20 * MIB}
    rows = list(series(seed, 3, 300, shape))
    plain = found_in(state_of(rows))
    rows += chance.sample(rows, 200)
    chance.shuffle(rows)
    assert found_in(state_of(rows)) == plain


def test_the_table_is_bounded_and_coarser_the_longer_ago() -> None:
    table = MemoryTable()
    for step in range(1, 20_000, 3):
        table.put(0, step, {"rss_bytes": float(step)})
    for level, width in enumerate((1, 16, 256)):
        steps, values = table.series(0, "rss_bytes", level)
        assert len(steps) <= 256
        assert np.array_equal(steps, values)
        assert steps[-1] > 20_000 - width - 3
        assert steps[0] <= 20_000 - min(len(steps) - 1, 250) * width


def test_kendall_and_sen_against_worked_examples() -> None:
    assert kendall_p(np.arange(10.0)) < 1e-4
    assert kendall_p(-np.arange(10.0)) == pytest.approx(0.5)
    slope, low, high = theil_sen(np.arange(20.0), 3 * np.arange(20.0) + 1)
    assert (slope, low, high) == (pytest.approx(3), pytest.approx(3), pytest.approx(3))
    noisy = 3 * np.arange(40.0)
    noisy[5] = 1e6  # one outlier
    assert theil_sen(np.arange(40.0), noisy)[0] == pytest.approx(3)
