"""GPU samples and driver messages: every threshold from both sides, and quiet fleets stay quiet."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.nvidia_codes import XID_WORDS
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.gpu.events import action_of
from rankscope_server.diagnose.gpu.health import outliers, throttles, worn
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.machine_table import MachineTable
from rankscope_server.verdict.answers import Look
from tests.analysis.gpu_samples import SECOND, gpu_columns, health
from tests.analysis.simulator import MS, START_NS

THERMAL, CAP = 0x040, 0x004


def chunk(kind: str, host: str, columns: Mapping[str, np.ndarray]) -> schema.Chunk:
    times = columns["time_ns"]
    return schema.Chunk(
        kind=kind, attempt=0, rank=-1, host=host, count=len(times), time_lo_ns=int(times.min()),
        time_hi_ns=int(times.max()), data=f"{kind} {host} {times.min()}".encode(),
    )  # fmt: skip


def put(what: RunState, kind: str, host: str, columns: dict[str, np.ndarray]) -> None:
    what.apply_chunk(chunk(kind, host, columns), dict(columns))


def registered(num_hosts: int = 2, per_host: int = 4) -> RunState:
    state = RunState("run")
    for rank in range(num_hosts * per_host):
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=num_hosts * per_host,
            local_rank=rank % per_host, local_world_size=per_host, node_rank=rank // per_host,
            host=f"node-{rank // per_host}", pid=1 + rank,
        ))  # fmt: skip
    return state


def of(look: Look, name: str) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == name]


# --- throttle ------------------------------------------------------------------------------------


def throttled(share: float, clock_loss: float, bit: int = THERMAL, busy: float = 0.95) -> RunState:
    state = registered()
    reasons, clock = np.zeros((4, 300)), np.full((4, 300), 1700.0)
    reasons[2, : int(300 * share)] = bit
    clock[2] *= 1 - clock_loss
    put(state, "gpu", "node-0", gpu_columns(4, 300))
    changes = {"throttle_reasons": reasons, "sm_clock_mhz": clock}
    columns = gpu_columns(4, 300, 1, utilization_ratio=np.array(busy), **changes)
    put(state, "gpu", "node-1", columns)
    return state


@pytest.mark.parametrize(
    ("share", "loss", "bit", "kinds"),
    [
        (0.34, 0.11, THERMAL, ["throttle"]),
        (0.34, 0.11, 0x080, ["throttle"]),
        (0.34, 0.11, 0x020, ["throttle"]),
        (0.07, 0.06, THERMAL, ["throttle"]),
        (0.03, 0.11, THERMAL, []),  # seldom
        (0.34, 0.03, THERMAL, []),  # the clock does not suffer
        (0.34, 0.0, CAP, ["power_cap"]),
        (0.34, 0.0, 0x001, []),  # idle
    ],
)
def test_thresholds_of_throttling(share: float, loss: float, bit: int, kinds: list[str]) -> None:
    found = of(throttled(share, loss, bit).look(START_NS + 300 * SECOND), "gpu-health")
    found = [one for one in found if one.kind != "gpu_outlier"]
    assert [one.kind for one in found] == kinds
    for finding in found:
        assert (finding.ranks, finding.hosts, finding.severity) == ((6,), ("node-1",), "info")


def test_an_idle_gpu_is_not_judged() -> None:
    assert of(throttled(0.5, 0.5, busy=0.0).look(START_NS + 300 * SECOND), "gpu-health") == []


def test_a_throttled_gpu_explains_its_slow_rank() -> None:
    state = throttled(0.4, 0.2)
    for rank in range(8):
        own = np.full(200, 100.0)
        if rank == 6:
            own[60:] += 25.0
        columns = {name: np.zeros(200, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, 201)
        columns["started_ns"] = START_NS + columns["step"] * SECOND
        whole = np.where(np.arange(200) >= 60, 127.0, 102.0)
        columns["duration_ns"] = (whole * MS).astype(np.int64)
        columns["backward_ns"] = columns["duration_ns"]
        columns["backward_blocked_ns"] = ((whole - own) * MS).astype(np.int64)
        state.apply_chunk(
            schema.Chunk(kind="steps", attempt=0, rank=rank, host="", count=200, time_lo_ns=1,
                         time_hi_ns=2, data=str(rank).encode()),
            dict(columns),
        )  # fmt: skip
    state.look(START_NS + 300 * SECOND)
    look = state.look(START_NS + 301 * SECOND)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("throttle", (6,))
    assert look.verdict.cost_throughput_ratio == pytest.approx(0.20, abs=0.02)
    assert [one.key for one in look.verdict.folded] == ["0/straggler/slow_compute/6"]


# --- memory errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "severity"),
    [
        ({"ecc_uncorrected": [0, 0, 0, 0]}, {"ecc_uncorrected": [0, 1, 0, 0]}, "critical"),
        ({"ecc_uncorrected": [0, 5, 0, 0]}, {"ecc_uncorrected": [0, 5, 0, 0]}, None),  # old
        ({"remap_failed": [0, 0, 0, 0]}, {"remap_failed": [0, 1, 0, 0]}, "critical"),
        ({"remap_pending": [0, 0, 0, 0]}, {"remap_pending": [0, 1, 0, 0]}, "warning"),
        ({"ecc_corrected": [0, 0, 0, 0]}, {"ecc_corrected": [2, 40, 3, 2]}, "warning"),
        ({"ecc_corrected": [0, 0, 0, 0]}, {"ecc_corrected": [9, 40, 9, 9]}, None),
        ({"ecc_corrected": [0, 0, 0, 0]}, {"ecc_corrected": [0, 9, 0, 0]}, None),
    ],
)
def test_thresholds_of_memory_errors(
    before: dict[str, list[int]], after: dict[str, list[int]], severity: str | None
) -> None:
    state = registered()
    put(state, "gpu", "node-1", gpu_columns(4, 100))
    put(state, "gpu_health", "node-1", health(after, 90))
    put(state, "gpu_health", "node-1", health(before, 0))  # late: order does not count
    found = of(state.look(START_NS + 100 * SECOND), "gpu-health")
    expected = [] if severity is None else [("ecc", severity, (5,))]
    assert [(finding.kind, finding.severity, finding.ranks) for finding in found] == expected


# --- fleet ---------------------------------------------------------------------------------------


def test_a_gpu_far_from_the_others_on_two_metrics() -> None:
    state = registered(4, 4)
    for host in range(4):
        changes = {}
        if host == 2:
            chance = np.random.default_rng(1)
            power = 600 + 10 * chance.normal(size=(4, 120))
            heat = 65 + chance.normal(size=(4, 120))
            power[1], heat[1] = 350, 92
            changes = {"power_watts": power, "temperature_celsius": heat}
        put(state, "gpu", f"node-{host}", gpu_columns(4, 120, host, **changes))
    found = of(state.look(START_NS + 120 * SECOND), "gpu-health")
    assert [(finding.kind, finding.severity, finding.ranks) for finding in found] == [
        ("gpu_outlier", "info", (9,))
    ]


def quiet_alarms(windows: range) -> int:
    """Return the alarms of a healthy fleet of 512 GPUs over windows of ten minutes."""
    alarms = 0
    for window in windows:
        table = MachineTable()
        chance = np.random.default_rng(window)
        for host in range(64):
            columns = gpu_columns(
                8, 60, 1000 * window + host,
                throttle_reasons=np.where(chance.random((8, 60)) < 0.02, THERMAL, 0),
            )  # fmt: skip
            columns["time_ns"] = START_NS + (columns["time_ns"] - START_NS) * 10
            table.take_chunk("gpu", f"n{host}", columns)
        alarms += len(throttles(table, POLICY)) + len(outliers(table, POLICY))
        alarms += len(worn(table, POLICY))
    return alarms


def test_a_quiet_fleet_of_five_hundred_gpus() -> None:
    assert quiet_alarms(range(4)) == 0


def test_gpus_with_little_to_do() -> None:
    state = registered()
    for host in range(2):
        put(state, "gpu", f"node-{host}", gpu_columns(4, 600, host, utilization_ratio=0.2))
    columns = {name: np.zeros(30, np.int64) for name in schema.STEP_COLUMNS}
    columns["step"] = np.arange(1, 31)
    columns["duration_ns"] = np.full(30, 10**8)
    state.apply_chunk(
        schema.Chunk(kind="steps", attempt=0, rank=0, host="", count=30, time_lo_ns=1,
                     time_hi_ns=2, data=b"0"),
        dict(columns),
    )  # fmt: skip
    assert of(state.look(START_NS + 600 * SECOND), "gpu-health") == []  # it computes on CPUs
    state.apply_record(schema.Metrics(
        attempt=0, rank=0, time_ns=START_NS, step=1, values={"cuda_allocated_bytes": 1e9},
    ))  # fmt: skip
    found = of(state.look(START_NS + 600 * SECOND), "gpu-health")
    assert [(finding.kind, finding.severity, finding.ranks) for finding in found] == [
        ("gpu_underuse", "info", ())
    ]
    assert "20 %" in found[0].what


# --- Xid -----------------------------------------------------------------------------------------


def xid(
    code: int, at_s: float, gpu: str = "2", host: str = "node-1", **fields: str
) -> schema.Event:
    said = {"number": str(code), "gpu": gpu, "host": host, "seen_in": "NVML"} | fields
    time_ns = START_NS + int(at_s * SECOND)
    return schema.Event(attempt=0, rank=-1, time_ns=time_ns, name="xid", fields=said)


def events_of(*events: schema.Event) -> list[Finding]:
    state = registered()
    put(state, "gpu", "node-1", gpu_columns(4, 30))
    for event in events:
        state.apply_record(event)
    return of(state.look(START_NS + 3600 * SECOND), "gpu-events")


@pytest.mark.parametrize("code", sorted(XID_WORDS))
def test_every_code_has_an_action_and_is_told_once(code: int) -> None:
    action = action_of(code)
    assert action != "unknown"
    found = events_of(xid(code, 5), xid(code, 6, seen_in="kernel log"), xid(code, 300))
    if action == "ignore":
        assert found == []
        return
    (finding,) = found
    assert finding.ranks == (6,)
    assert f"Xid {code}" in finding.what
    expected = {"restart": "warning", "reset": "critical", "drain": "critical", "vendor": "warning"}
    assert finding.severity == expected[action]


def test_ten_minutes_later_it_is_another_one() -> None:
    assert len(events_of(xid(79, 5), xid(79, 500), xid(79, 700))) == 2


def test_channels_that_end_after_another_xid_are_its_echo() -> None:
    (finding,) = events_of(xid(79, 5), xid(43, 20), xid(45, 21))
    assert "Xid 79" in finding.what
    assert len(events_of(xid(79, 5), xid(43, 20, gpu="1"))) == 2  # another GPU
    assert len(events_of(xid(79, 5), xid(43, 80))) == 2  # too late to be an echo


def test_a_code_that_nobody_knows_is_info() -> None:
    (finding,) = events_of(xid(999, 5))
    assert (finding.severity, "catalogue" in finding.next) == ("info", True)


def test_what_happened_before_the_attempt_is_not_its_own() -> None:
    assert events_of(xid(79, -50)) == []


def test_no_gpu_is_skipped_not_healthy() -> None:
    look = registered().look(START_NS)
    states = {detector.name: detector.state for detector in look.detectors}
    assert (states["gpu-health"], states["gpu-events"]) == ("skipped", "skipped")


@pytest.mark.parametrize("seed", range(3))
def test_order_and_doubling_change_nothing(seed: int) -> None:
    parts = [gpu_columns(4, 60, at, start_s=60 * at) for at in range(5)]
    for at, part in enumerate(parts):
        rows = part["gpu"] == 2
        part["throttle_reasons"][rows] = THERMAL * (at % 2)
        part["sm_clock_mhz"][rows] = 1500
    items: list[tuple[str, dict[str, np.ndarray]]] = [("gpu", part) for part in parts]
    events = [xid(79, 5), xid(43, 6), xid(48, 100)]
    results = []
    chance = random.Random(seed)
    for turn in range(2):
        state = registered(2)
        mixed: list[object] = [*items, *events]
        if turn:
            mixed += [*items[:2], events[0]]
            chance.shuffle(mixed)
        for item in mixed:
            if isinstance(item, tuple):
                put(state, item[0], "node-1", item[1])
            else:
                state.apply_record(item)
        look = state.look(START_NS + 300 * SECOND)
        results.append(of(look, "gpu-health") + of(look, "gpu-events"))
    assert results[0] == results[1]
    assert results[0]
