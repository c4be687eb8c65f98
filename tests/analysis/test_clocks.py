"""Clocks: the band covers the truth always, and is no wider than it must be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.clock_table import ClockTable, synchronising
from rankscope_server.observe.clocks import SERVER, Clocks
from rankscope_server.observe.collectives import Collectives
from rankscope_server.observe.operation_clock_times import KEPT, OperationClockTimes
from tests.analysis.collective_columns import MS, START_NS, columns_of
from tests.analysis.simulator import say


@dataclass(frozen=True)
class Hosts:
    """Hosts that meet in a collective again and again. Times are ms."""

    count: int = 64
    operations: int = 200
    offset_ms: float = 20.0
    jitter_ms: float = 5.0
    transfer_ms: float = 1.0
    apart_ms: float = 100.0
    drift_ppm: float = 0.0
    late_host: int = -1
    late_ms: float = 50.0
    step_at: int = -1  # operation before which the clock of host 0 is set
    step_ms: float = 0.0
    seed: int = 0


def simulate(hosts: Hosts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts and ends (operation, host) on the hosts' clocks, and theta at the end, ms."""
    chance = np.random.default_rng(hosts.seed)
    theta = chance.uniform(-hosts.offset_ms, hosts.offset_ms, hosts.count)
    drift = chance.uniform(-1, 1, hosts.count) * hosts.drift_ppm * 1e-6
    begin = np.arange(hosts.operations)[:, None] * hosts.apart_ms
    late = np.zeros(hosts.count)
    if hosts.late_host >= 0:
        late[hosts.late_host] = hosts.late_ms
    starts = begin + chance.exponential(hosts.jitter_ms, (hosts.operations, hosts.count)) + late
    took = hosts.transfer_ms * (1 + chance.exponential(0.1, starts.shape))
    ends = starts.max(1, keepdims=True) + took
    end = float(begin[-1, 0])
    stepped = np.zeros((hosts.operations, hosts.count))
    if hosts.step_at >= 0:
        stepped[: hosts.step_at, 0] = -hosts.step_ms

    def shown(true: np.ndarray) -> np.ndarray:
        return true + theta + drift * (true - end) + stepped

    return shown(starts), shown(ends), theta


def name(host: int) -> str:
    return f"node-{host:04d}"


def aligned(hosts: Hosts, lost: float = 0.0) -> tuple[Clocks, np.ndarray]:
    starts, ends, theta = simulate(hosts)
    table = ClockTable()
    chance = np.random.default_rng(hosts.seed)
    for host in chance.permutation(hosts.count).tolist():
        for begin in range(0, hosts.operations, 50):
            part = slice(begin, begin + 50)
            if chance.random() >= lost:
                columns = columns_of(starts[part, host], ends[part, host], begin + 1)
                table.add(synchronising(Collectives.of(host, columns)))
    where = {host: name(host) for host in range(hosts.count)}
    return table.clocks(where, POLICY.clock_drift_ratio), theta


def errors(clocks: Clocks, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the error of each difference against host 0, and its band."""
    found = [clocks.difference_ms(name(host), name(0)) for host in range(1, len(theta))]
    assert all(pair is not None for pair in found)
    pairs = np.array(found, float)
    return np.abs(pairs[:, 0] - (theta[1:] - theta[0])), pairs[:, 1]


CASES = {
    "64 hosts": (Hosts(64), 0.018, 0.53),
    "128 hosts": (Hosts(128), 0.036, 1.48),
    "10 ppm": (Hosts(64, drift_ppm=10.0), 0.12, 1.46),
    "20 ms transfer": (Hosts(64, transfer_ms=20.0), 0.44, 1.59),
    "one host late": (Hosts(64, late_host=5), 1.45, 16.3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_band_covers_the_truth_and_is_as_narrow_as_the_prototype(case: str) -> None:
    hosts, median_mark, max_mark = CASES[case]
    medians, largest, bands = [], [], []
    for seed in range(4):
        error, band = errors(*aligned(replace(hosts, seed=seed)))
        assert (error <= band + 2e-3).all(), seed  # times are whole microseconds
        medians.append(np.median(error))
        largest.append(error.max())
        bands.append(band.max())
    say(
        f"clocks, {case}: median error {np.median(medians):.3f} ms, max {max(largest):.2f} ms "
        f"(prototype {median_mark}, {max_mark}); widest band {max(bands):.1f} ms"
    )
    if case == "one host late":  # the tool knows what it does not know
        assert max(bands) > 20.0


@pytest.mark.parametrize("seed", range(12))
def test_the_band_covers_the_truth_whatever_the_hosts_do(seed: int) -> None:
    chance = np.random.default_rng(seed)
    hosts = Hosts(
        count=int(chance.integers(2, 40)),
        operations=int(chance.integers(2, 400)),
        offset_ms=float(10 ** chance.uniform(0, 5)),
        jitter_ms=float(10 ** chance.uniform(-1, 2)),
        transfer_ms=float(10 ** chance.uniform(-2, 2)),
        apart_ms=float(10 ** chance.uniform(0, 3)),
        drift_ppm=float(chance.uniform(0, 50)),
        seed=seed,
    )
    error, band = errors(*aligned(hosts, lost=0.0 if hosts.operations < 100 else 0.05))
    assert (error <= band + 2e-3).all()


def test_two_hundred_ms_and_fifty_ppm_are_covered_within_twice_the_transfer() -> None:
    """As the test on gloo asks: coverage, and a width of at most twice the fastest transfer."""
    covered = narrow = count = 0
    for seed in range(20):
        hosts = Hosts(4, 400, 200.0, 5.0, 2.0, 50.0, 50.0, seed=seed)
        error, band = errors(*aligned(hosts))
        covered += int((error <= band + 2e-3).sum())
        narrow += int((2 * band <= 2 * hosts.transfer_ms * 1.3).sum())
        count += len(error)
    say(f"clocks, 200 ms and 50 ppm: covered {covered} of {count}, narrow {narrow}")
    assert covered == count
    assert narrow >= 0.9 * count


def test_a_clock_that_was_set_is_found_within_a_hundred_operations() -> None:
    for seed in range(10):
        hosts = Hosts(8, 300, step_at=200, step_ms=150.0, seed=seed)
        clocks, theta = aligned(hosts)
        error, band = errors(clocks, theta)
        assert (error <= band + 2e-3).all(), seed
        assert clocks.stepped == (name(0),), seed


def test_events_closer_than_the_band_have_no_order() -> None:
    clocks, theta = aligned(Hosts(8))
    band = clocks.band_ms(name(1), name(2))
    assert 0 < band < 3
    true = 5000.0
    for apart, order in ((4 * band, "after"), (0.0, "unknown"), (-4 * band, "before")):
        one = START_NS + int((true + apart + theta[1]) * MS)
        other = START_NS + int((true + theta[2]) * MS)
        assert clocks.order(name(1), one, name(2), other) == order
    assert clocks.order(name(1), 5, name(1), 4) == "after"
    assert clocks.order("nobody", 5, name(1), 4) == "unknown"
    assert clocks.band_ms("nobody", name(1)) == float("inf")


def test_requests_to_the_server_tell_a_late_host_from_a_fast_clock() -> None:
    hosts = Hosts(4, late_host=3)
    starts, ends, theta = simulate(hosts)
    table = ClockTable()
    for host in range(4):
        table.add(synchronising(Collectives.of(host, columns_of(starts[:, host], ends[:, host]))))
        table.add_exchange(schema.ClockOffset(
            attempt=0, rank=-1, time_ns=START_NS + 20_000 * MS, host=name(host),
            offset_ns=int((-theta[host] + 0.1) * MS), band_ns=MS // 5,
        ))  # fmt: skip
    clocks = table.clocks({host: name(host) for host in range(4)}, POLICY.clock_drift_ratio)
    error, band = errors(clocks, theta)
    assert (error <= band).all()
    assert band.max() < 1.0  # without them some 35 ms
    server = clocks.difference_ms(name(1), SERVER)
    assert server is not None
    assert abs(server[0] - theta[1]) <= server[1]


def finding_hosts(offsets: list[float], seed: int = 0) -> list[tuple[str, str]]:
    """Return what the detector says of hosts with such offsets."""
    starts, ends, theta = simulate(Hosts(len(offsets), seed=seed))
    state = RunState("clocks")
    for host, offset in enumerate(offsets):
        move = offset - theta[host]
        who = {"attempt": 0, "rank": host, "time_ns": START_NS}
        state.apply_record(schema.RankRegistered(
            **who, world_size=len(offsets), local_rank=0, local_world_size=1, node_rank=host,
            host=name(host), pid=1, backend="gloo",
        ))  # fmt: skip
        columns = columns_of(starts[:, host] + move, ends[:, host] + move)
        data = encode_chunk(columns)
        state.apply_chunk(
            schema.Chunk(kind="collectives", attempt=0, rank=host, host=name(host), count=200,
                         time_lo_ns=START_NS, time_hi_ns=START_NS, data=data), columns,
        )  # fmt: skip
    found = state.look(START_NS + 60 * 10**9).findings
    return [(f.hosts[0], f.severity) for f in found if f.kind == "clock_offset"]


def test_only_the_clock_that_is_apart_is_told() -> None:
    assert finding_hosts([0.0, 1.0, -1.0, 41.0, 0.5, 2.0]) == [(name(3), "info")]
    assert finding_hosts([0.0, -1500.0, 0.0, 3.0]) == [(name(1), "warning")]
    assert finding_hosts([0.0, 1.0, -1.0, 2.0]) == []


def test_a_host_without_ranks_is_told_too() -> None:
    """Its collector compares clocks with the server before any rank of it is known."""
    state = RunState("clocks")
    for host in range(5):
        offset_ns = 2 * 10**9 if host == 4 else 0
        who = {"attempt": 0, "rank": schema.NODE_RANK, "time_ns": START_NS}
        state.apply_record(schema.ClockOffset(
            **who, offset_ns=offset_ns, band_ns=10**6, host=name(host)
        ))  # fmt: skip
        if host < 4:
            state.apply_record(schema.RankRegistered(
                **who | {"rank": host}, world_size=5, local_rank=0, local_world_size=1,
                node_rank=host, host=name(host), pid=1, backend="gloo",
            ))  # fmt: skip
    found = [f for f in state.look(START_NS + 10**9).findings if f.kind == "clock_offset"]
    assert [(f.hosts, f.ranks) for f in found] == [((name(4),), ())]
    assert "server" in found[0].why


def test_a_thousand_hosts_are_aligned_in_two_seconds() -> None:
    import time

    hosts = Hosts(1024, 60)
    starts, ends, theta = simulate(hosts)
    table = ClockTable()
    for host in range(1024):
        table.add(synchronising(Collectives.of(host, columns_of(starts[:, host], ends[:, host]))))
    began = time.process_time()
    clocks = table.clocks({host: name(host) for host in range(1024)}, POLICY.clock_drift_ratio)
    took = time.process_time() - began
    error, band = errors(clocks, theta)
    say(f"clocks of 1,024 hosts: {took:.2f} s, largest error {error.max():.2f} ms")
    assert (error <= band + 2e-3).all()
    assert took < 3.0


@pytest.mark.parametrize("at_once", [100, 2_000])
def test_operations_that_are_kept_span_half_a_minute_however_they_come(at_once: int) -> None:
    table, numbers = OperationClockTimes(1), np.arange(1, 4_001)
    starts_ns = START_NS + numbers * 17_500_000  # 57 a second
    for begin in range(0, len(numbers), at_once):
        part = slice(begin, begin + at_once)
        kept = table.is_kept(numbers[part])
        columns = (numbers, np.zeros(len(numbers), np.int64), starts_ns, starts_ns + 1_000_000)
        table.put(*(column[part][kept] for column in columns))
    starts, _ = table.newest(KEPT)
    assert int(starts.max() - starts.min()) >= 30_000_000_000
    assert len(table.numbers) <= 2 * KEPT
