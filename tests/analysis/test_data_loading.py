"""Steps that wait for data: the loss, the cause and the advice; hidden waits are no loss."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.analysis.records import registered
from tests.analysis.simulator import MS, START_NS, Job, apply, record


def chunk(rank: int, columns: dict[str, Column], kind: str = "steps", host: str = ""):
    count = len(next(iter(columns.values())))
    return schema.Chunk(
        kind=kind, attempt=0, rank=rank, host=host, count=count, time_lo_ns=1, time_hi_ns=2,
        data=f"{kind} {rank} {host}".encode(),
    ), columns  # fmt: skip


def run(
    data_ms: np.ndarray,
    compute_ms: np.ndarray | float = 100.0,
    loader: dict[str, str] | None = None,
    relabel: list[int] | None = None,
    scale: float = 1.0,
) -> RunState:
    """Return a data-parallel job: ranks x steps of waiting for data; all end a step together."""
    num_ranks, num_steps = data_ms.shape
    chance = np.random.default_rng(7)
    own = data_ms + compute_ms * np.exp(0.02 * chance.normal(size=data_ms.shape))
    duration = own.max(0) + 5.0
    state = RunState("run")
    for row in range(num_ranks):
        rank = relabel[row] if relabel else row
        state.apply_record(registered(rank, num_ranks))
        if loader is not None:
            state.apply_record(schema.Event(
                attempt=0, rank=rank, time_ns=START_NS, name="data loader", fields=loader,
            ))  # fmt: skip
        columns = {name: np.zeros(num_steps, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, num_steps + 1)
        columns["started_ns"] = START_NS + columns["step"] * 10**9
        whole = duration * scale * MS
        columns["duration_ns"] = whole.astype(np.int64)
        columns["data_ns"] = (data_ms[row] * scale * MS).astype(np.int64)
        columns["backward_ns"] = columns["duration_ns"] - columns["data_ns"]
        columns["backward_blocked_ns"] = ((duration - own[row]) * scale * MS).astype(np.int64)
        state.apply_chunk(*chunk(rank, dict(columns)))
    return state


def host_load(state: RunState, busy: float, iowait: float, cpus: int = 32) -> RunState:
    """Give samples of a host: share of all processors that is busy, that waits for disks."""
    count = 120
    columns: dict[str, Column] = {
        name: np.full(count, -1, np.int64) for name in schema.CHUNK_COLUMNS["host"]
    }
    columns["time_ns"] = START_NS + np.arange(count) * 10**9
    columns["cpu_user_us_total"] = (np.arange(count) * 1e6 * busy).astype(np.int64)
    columns["cpu_system_us_total"] = np.zeros(count, np.int64)
    columns["cpu_iowait_us_total"] = (np.arange(count) * 1e6 * iowait).astype(np.int64)
    columns["num_cpus"] = np.full(count, cpus)
    state.apply_chunk(*chunk(-1, columns, "host", "node-0"))
    return state


LOADER = {"num_workers": "2", "prefetch_factor": "2", "persistent_workers": "False"}


def steady(seed: int, ms: float, ranks: int = 4, steps: int = 300) -> np.ndarray:
    return ms * np.exp(0.1 * np.random.default_rng(seed).normal(size=(ranks, steps)))


def found_in(state: RunState) -> list[Finding]:
    look = state.look(START_NS + 10**13)
    assert all(
        detector.state == "ran" for detector in look.detectors if detector.name == "data-loading"
    )
    return [finding for finding in look.findings if finding.detector == "data-loading"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("wait_ms", [20.0, 60.0])
def test_a_loader_that_all_ranks_wait_for(seed: int, wait_ms: float) -> None:
    state = host_load(run(steady(seed, wait_ms), loader=LOADER), busy=0.5, iowait=0.0)
    (finding,) = found_in(state)
    assert (finding.kind, finding.ranks, finding.severity) == ("slow_data", (), "warning")
    assert finding.cost_throughput_ratio == pytest.approx(wait_ms / (wait_ms + 108), abs=0.03)
    assert "preprocessing" in finding.why
    # production takes one step; without the wait a step is as long as computing
    wanted = int(finding.next.rsplit(" ", 1)[1])
    assert wanted >= 2 * (wait_ms + 108) / 108


def test_no_workers() -> None:
    (finding,) = found_in(run(steady(1, 80.0), loader=LOADER | {"num_workers": "0"}))
    assert finding.next == "Give the DataLoader num_workers=2"


def test_fetch_bound() -> None:
    (finding,) = found_in(host_load(run(steady(1, 80.0), loader=LOADER), 0.1, 0.3))
    assert "reading is the limit" in finding.why
    assert finding.confidence >= 0.85


def test_an_unknown_cause_is_said_to_be_unknown() -> None:
    (finding,) = found_in(host_load(run(steady(1, 80.0), loader=LOADER), 0.05, 0.0))
    assert "py-spy" in finding.next
    assert finding.confidence < 0.7


@pytest.mark.parametrize("seed", range(10))
def test_waits_that_a_slower_peer_hides_are_no_loss(seed: int) -> None:
    data = steady(seed, 0.5)
    data[1:] += 60.0
    compute = np.full((4, 1), 100.0)
    compute[0] = 200.0  # rank 0 has more to compute, the others would wait for it anyway
    assert found_in(run(data, compute, loader=LOADER)) == []


@pytest.mark.parametrize("seed", range(10))
def test_each_epoch_begins_with_a_wait(seed: int) -> None:
    data = steady(seed, 0.5, steps=400)
    every = 40 + seed
    data[:, ::every] += 1200.0
    (finding,) = found_in(run(data, loader=LOADER))
    assert (finding.kind, finding.ranks) == ("slow_epoch_start", ())
    assert "persistent_workers=True" in finding.next
    assert f"every {every}" in finding.why
    (finding,) = found_in(run(data, loader=LOADER | {"persistent_workers": "True"}))
    assert "persist" in finding.why


def begins(state: RunState, ranks: int, steps: list[int]) -> RunState:
    """Say with which steps passes over the data begin: each after its fourth batch."""
    for rank in range(ranks):
        for number, step in enumerate(steps, 1):
            state.apply_record(schema.Event(
                attempt=0, rank=rank, time_ns=START_NS + step, name="data pass", step=step + 3,
                fields={"loader": "0", "pass": str(number), "batches": f"{step} {rank} a b"},
            ))  # fmt: skip
    return state


@pytest.mark.parametrize("ranks", [(), (2,)])
def test_waits_at_even_distances_are_an_epochs_only_where_one_begins(
    ranks: tuple[int, ...],
) -> None:
    data = steady(4, 0.5, steps=400)
    data[ranks or slice(None), 19::20] += 700.0
    at = list(range(20, 400, 20))
    (finding,) = found_in(begins(run(data, loader=LOADER), 4, at))
    assert (finding.kind, finding.ranks) == ("slow_epoch_start", ranks)
    assert finding.confidence >= 0.85
    for other in ([1], [1, 151, 301]):
        (finding,) = found_in(begins(run(data, loader=LOADER), 4, other))
        assert (finding.kind, finding.ranks) == ("bad_shard" if ranks else "slow_data", ranks)
        assert "one every 20 steps" in finding.why
        assert "epoch" not in finding.what + finding.why + finding.next


def test_of_what_is_not_known_no_epoch_is_said() -> None:
    data = steady(4, 0.5, steps=400)
    data[:, 19::20] += 700.0
    (finding,) = found_in(run(data))
    assert "every 20 steps, as where epochs begin" in finding.what
    assert "persist" not in finding.why
    assert finding.next.startswith("See whether an epoch begins with these steps")
    assert finding.confidence < 0.85


@pytest.mark.parametrize("seed", range(10))
def test_a_shard_that_is_slow_now_and_then(seed: int) -> None:
    chance = random.Random(seed)
    data = steady(seed, 0.5, steps=400)
    rank = chance.randrange(4)
    for step in chance.sample(range(30, 400), 50):
        data[rank, step] += 400.0
    (finding,) = found_in(run(data, loader=LOADER))
    assert (finding.kind, finding.ranks) == ("bad_shard", (rank,))


@pytest.mark.parametrize("seed", range(5))
def test_three_bad_shards_of_sixteen_and_nobody_else(seed: int) -> None:
    chance = random.Random(seed)
    data = steady(seed, 0.5, ranks=16, steps=400)
    ranks = tuple(sorted(chance.sample(range(16), 3)))
    for rank in ranks:
        for step in chance.sample(range(30, 400), 40):
            data[rank, step] += 400.0
    (finding,) = found_in(run(data, loader=LOADER))
    assert (finding.kind, finding.ranks) == ("bad_shard", ranks)


def test_a_wait_of_one_rank_at_even_distances_is_an_epochs() -> None:
    data = steady(2, 0.5, steps=320)
    data[1, 16::17] += 1000.0
    (finding,) = found_in(run(data, loader=LOADER))
    assert (finding.kind, finding.ranks) == ("slow_epoch_start", (1,))


def test_one_slow_worker_of_four() -> None:
    data = steady(3, 0.5)
    data[:, ::4] += 120.0
    (finding,) = found_in(run(data, loader=LOADER | {"num_workers": "4"}))
    assert finding.kind == "bad_shard"
    assert "one of them is slow" in finding.why


def test_batches_loaded_ahead_run_out() -> None:
    data = steady(3, 0.5)
    data[:, ::8] += 200.0
    (finding,) = found_in(run(data, loader=LOADER | {"num_workers": "4"}))
    assert "prefetch_factor" in finding.next


def test_a_rank_that_always_waits_is_the_stragglers() -> None:
    data = steady(3, 0.5)
    data[2, 100:] += 80.0
    state = run(data, loader=LOADER)
    assert found_in(state) == []
    verdict = state.look(START_NS + 10**13).verdict
    assert verdict is not None
    assert (verdict.detector, verdict.kind, verdict.ranks) == ("straggler", "slow_data", (2,))


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_are_silent(seed: int) -> None:
    assert found_in(run(steady(seed, 0.02 * (seed + 1) * 10, ranks=8))) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_jobs_of_the_simulator_are_silent(seed: int) -> None:
    state = RunState("run")
    recording = record(Job(steps=120, seed=seed, num_stages=1 + 3 * (seed % 2)))
    apply(state, [*recording.items(), *recording.states(recording.last_ms)])
    assert found_in(state) == []


def test_other_ranks_and_another_pace_change_nothing() -> None:
    data = steady(2, 0.5, steps=400)
    for step in range(40, 400, 7):
        data[1, step] += 300.0
    (plain,) = found_in(run(data, loader=LOADER))
    (relabelled,) = found_in(run(data, loader=LOADER, relabel=[2, 3, 0, 1]))
    assert relabelled.ranks == (3,)
    (slower,) = found_in(run(data, loader=LOADER, scale=7.0))
    assert slower.cost_throughput_ratio == pytest.approx(plain.cost_throughput_ratio, rel=1e-3)
    assert (plain.kind, plain.onset_step) == (slower.kind, slower.onset_step)
