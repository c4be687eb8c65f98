"""Pages of ranks on devices: a host that only enqueues does not know what its device waits for."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.analysis.baselines import _summary
from rankscope_server.api.steps.cells import Held
from rankscope_server.findings.policy import POLICY
from rankscope_server.ingest.step_metrics import known_to_host, metrics_of_device
from tests.server.conftest import Sender, TestClient

NOW = 1_700_000_000 * 10**9
MS = 1_000_000
COUNT, EVERY, SLOW, FROM = 200, 4, 2, 100


def steps(rank: int, *, blocked_ms: int = 0) -> schema.Chunk:
    """Return what the host of a rank saw: 100 ms a step, like that of all others."""
    columns = {name: np.zeros(COUNT, np.int64) for name in schema.STEP_COLUMNS}
    columns["step"] = np.arange(1, COUNT + 1)
    columns["duration_ns"] = columns["other_ns"] = np.full(COUNT, 100 * MS)
    columns["other_blocked_ns"] = np.full(COUNT, blocked_ms * MS)
    columns["num_collectives"] = np.full(COUNT, 3)
    columns["started_ns"] = NOW + np.arange(COUNT) * 100 * MS
    return schema.Chunk(
        kind="steps", attempt=0, rank=rank, host="node-a", count=COUNT, time_lo_ns=NOW,
        time_hi_ns=NOW + COUNT * 100 * MS, step_lo=1, step_hi=COUNT,
        data=encode_chunk(dict(columns)),
    )  # fmt: skip


def calls(blocked_us: int) -> tuple[schema.Chunk, dict[str, Any]]:
    """Return collectives of one rank, without an end, and their columns."""
    columns: dict[str, Any] = {
        name: np.zeros(COUNT, np.int64) for name in schema.COLLECTIVE_COLUMNS
    }
    columns |= {name: [""] * COUNT for name in columns if name in schema.STRING_COLUMNS}
    columns["group"] = ["world"] * COUNT
    columns["operation"] = ["all_reduce"] * COUNT
    columns["step"] = columns["sequence"] = np.arange(1, COUNT + 1)
    columns["size_bytes"] = np.full(COUNT, 1 << 20)
    columns["duration_ns"] = columns["device_duration_ns"] = np.full(COUNT, -1)
    columns["blocked_ns"] = np.full(COUNT, blocked_us * 1_000)
    columns["arrived_ns"] = NOW + columns["step"] * 100 * MS
    chunk = schema.Chunk(
        kind="collectives", attempt=0, rank=0, host="node-a", count=COUNT, time_lo_ns=NOW,
        time_hi_ns=NOW + COUNT * 100 * MS, step_lo=1, step_hi=COUNT, data=encode_chunk(columns),
    )  # fmt: skip
    return chunk, columns


def measured(rank: int) -> list[schema.Metrics]:
    """Return what the device measured: one rank computes for 80 ms, the others wait for it."""
    found = []
    for step in range(EVERY, COUNT + 1, EVERY):
        waits_ms = 5 if rank == SLOW and step >= FROM else 55 if step >= FROM else 70
        found.append(schema.Metrics(
            attempt=0, rank=rank, time_ns=NOW + step * 100 * MS, step=step, values={
                "gpu_forward_seconds": (90 - waits_ms) / 1e3, "gpu_optimizer_seconds": 0.010,
                "gpu_backward_seconds": waits_ms / 1e3, "gpu_backward_wait_seconds": waits_ms / 1e3,
                "gpu_forward_wait_seconds": 0.0,
            },
        ))  # fmt: skip
    return found


def send(client: TestClient, backend: str, *parts: list[Any], blocked_ms: int = 0) -> Sender:
    """Send registrations, then each part in a batch of its own; None stands for the steps."""
    sender = Sender(client, run_id="job", producer="p")
    registered = [schema.RankRegistered(
        attempt=0, rank=rank, time_ns=NOW, world_size=4, local_rank=rank, local_world_size=4,
        node_rank=0, host="node-a", pid=rank + 1, backend=backend,
    ) for rank in range(4)]  # fmt: skip
    sender.send(
        schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="train.py", world_size=4),
        *registered,
    )
    for part in parts:
        chunks = [] if part else [steps(rank, blocked_ms=blocked_ms) for rank in range(4)]
        sender.send(*part, chunks=chunks)
    return sender


def cells_of(page: dict[str, Any]) -> Any:
    """Return the map's ratios, ranks x columns; NaN where nothing is known."""
    raw = np.frombuffer(base64.b64decode(page["cells"]), np.uint8).reshape(4, page["columns"])
    return np.where(raw == 255, np.nan, 2.0 ** ((raw.astype(float) - 127) / 127))


@pytest.mark.parametrize("is_measured_first", [True, False])
def test_the_map_shows_what_devices_measured(client: TestClient, is_measured_first: bool) -> None:
    numbers = [one for rank in range(4) for one in measured(rank)]
    order: list[list[Any]] = [numbers, []] if is_measured_first else [[], numbers]
    sender = send(client, "nccl", *order)
    page = sender.get("/map", metric="own_work", width=400)
    assert "Devices were measured in one of about 4 steps" in page["text"]
    cells = cells_of(page)
    assert np.nanmax(cells[:, : FROM - 1]) == pytest.approx(1.0, abs=0.02)
    assert cells[SLOW, FROM:].min() > 1.9
    assert np.nanmax(np.delete(cells, SLOW, 0)) == pytest.approx(1.0, abs=0.02)
    assert np.isnan(cells[:, : EVERY - 1]).all()  # before the first one that was measured
    assert not np.isnan(cells[:, EVERY - 1 :]).any()
    zoomed = cells_of(sender.get("/map", **{"from": FROM + 1, "to": FROM + 9}, width=400))
    np.testing.assert_equal(zoomed, cells[:, FROM : FROM + 9])  # samples from before it hold
    waiting = next(one for one in sender.get("")["numbers"] if one["key"] == "waiting")
    assert waiting["value"] == pytest.approx(3 * 0.5 / 4, abs=0.01)
    assert waiting["reference_text"].endswith("; 5.0 % more in communication")
    budget = sender.get("/budget", last=50)
    assert budget["rows"][0]["parts"]["forward"] == pytest.approx(35.0, abs=1.0)
    assert budget["rows"][0]["parts"]["waiting"] == pytest.approx(50.0, abs=1.0)


def test_what_was_not_measured_is_not_drawn_as_work(client: TestClient) -> None:
    sender = send(client, "nccl", [])
    page = sender.get("/map", metric="own_work", width=400)
    assert np.isnan(cells_of(page)).all()
    assert page["text"].startswith("Not known: hosts only enqueue here")
    assert not np.isnan(cells_of(sender.get("/map", metric="step", width=400))).any()
    waiting = next(one for one in sender.get("")["numbers"] if one["key"] == "waiting")
    assert waiting["value"] is None
    budget = sender.get("/budget", last=50)
    assert budget["rows"] == []
    assert budget["text"].startswith("Not known: hosts only enqueue here")


@pytest.mark.parametrize(("backend", "blocked_ms"), [("gloo", 0), ("nccl", 20)])
def test_hosts_that_wait_themselves_are_drawn(
    client: TestClient, backend: str, blocked_ms: int
) -> None:
    sender = send(client, backend, [], blocked_ms=blocked_ms)
    page = sender.get("/map", metric="own_work", width=400)
    assert np.nanmax(cells_of(page)) == pytest.approx(1.0, abs=0.02)
    waiting = next(one for one in sender.get("")["numbers"] if one["key"] == "waiting")
    assert waiting["value"] == 0  # they wait for transfers, not for each other
    assert ("20 % more in communication" in waiting["reference_text"]) == (blocked_ms == 20)


@pytest.mark.parametrize(("backend", "blocked_us"), [("nccl", 8), ("nccl", 900), ("gloo", 8)])
def test_what_a_host_enqueues_is_not_exposed_time(
    client: TestClient, backend: str, blocked_us: int
) -> None:
    chunk, columns = calls(blocked_us)
    group = schema.GroupDefined(
        attempt=0, rank=0, time_ns=NOW, group="world", ranks=[0, 1, 2, 3], backend=backend
    )
    sender = send(client, backend, [])
    sender.send(group, chunks=[chunk])
    page = sender.get("/collectives")
    (row,) = page["rows"]
    if (backend, blocked_us) == ("nccl", 8):
        assert row["exposed_ms_per_step"] is None
        assert "on the devices is not known" in page["text"]
    else:
        total_ms = len(columns["step"]) * blocked_us / 1e3
        assert row["exposed_ms_per_step"] == pytest.approx(total_ms / COUNT / 4)


def test_samples_do_not_replace_what_a_host_knows_of_all_steps(client: TestClient) -> None:
    numbers = [one for rank in range(4) for one in measured(rank)]
    sender = send(client, "gloo", [], numbers, blocked_ms=20)
    assert np.nanmax(cells_of(sender.get("/map", metric="own_work", width=400))) == pytest.approx(
        1.0, abs=0.02
    )


def test_only_steps_whose_waits_are_known_count() -> None:
    assert metrics_of_device({"gpu_forward_seconds": 0.1, "loss": 1.0}) == {}
    assert metrics_of_device({"gpu_other_wait_seconds": 0.0, "gpu_data_seconds": np.inf}) == {}
    cells = metrics_of_device({
        "gpu_forward_seconds": 0.1, "gpu_forward_wait_seconds": 0.03, "gpu_data_seconds": 0.02,
        "gpu_data_wait_seconds": 0.01, "gpu_other_wait_seconds": 0.0,
    })  # fmt: skip
    shown = {name: round(float(cell[0]), 3) for name, cell in cells.items()}
    assert (shown["own_work"], shown["blocked"]) == (80.0, 40.0)
    assert (shown["forward_blocked"], shown["other_blocked"]) == (30.0, 10.0)


def test_the_host_knows_how_long_its_steps_take() -> None:
    values = {"step": np.full(3, 10.0), "blocked": np.zeros(3), "forward": np.full(3, 9.0)}
    assert list(known_to_host(dict(values))) == ["step"]
    values["blocked"] = np.array([0.0, 4.0, 4.0])
    assert known_to_host(dict(values)).keys() == values.keys()


def test_a_sample_stands_for_the_steps_behind_it_for_a_while() -> None:
    held = Held(np.array([True, False]), 3)
    none = np.nan
    first = held.fill(np.array([[none, 2.0, none, none], [none, 5.0, none, none]]))
    np.testing.assert_equal(first, [[none, 2, 2, 2], [none, 5, none, none]])
    second = held.fill(np.array([[none, none, 7.0, none], [none, none, none, 1.0]]))
    np.testing.assert_equal(second, [[2, none, 7, 7], [none, none, none, 1]])
    assert (held.num_measured, held.num_held) == (2, 6)
    early = held.fill(np.array([[3.0, none, none, none], [none, none, none, none]]), early=3)
    np.testing.assert_equal(early, [[3, 3, 3, 3], [none] * 4])
    assert (held.num_measured, held.num_held) == (2, 7)


@pytest.mark.parametrize(
    ("backend", "told", "ended"),
    [
        ("nccl", {}, None),
        ("nccl", {"ends_are_known": True}, 0),
        ("nccl", {"ended": 7}, 7),
        ("gloo", {}, 0),
    ],
)
def test_nothing_ended_is_said_only_where_ends_are_reported(
    client: TestClient, backend: str, told: dict[str, Any], ended: int | None
) -> None:
    sender = send(client, backend, [])
    group = schema.GroupState(**({"group": "world", "issued": 9, "ended": 0} | told))
    sender.send(
        schema.GroupDefined(
            attempt=0, rank=0, time_ns=NOW, group="world", ranks=[0, 1, 2, 3], backend=backend
        ),
        schema.RankState(
            attempt=0, rank=0, time_ns=NOW, step=9, phase="other", phase_since_ns=NOW,
            heartbeat_ns=NOW, cpu_seconds=1.0, rss_bytes=1, groups=[group],
        ),
    )  # fmt: skip
    (row,) = sender.get("/ranks/0")["groups"]
    assert (row["issued"], row["ended"]) == (9, ended)


@pytest.mark.parametrize(("backend", "phases"), [("nccl", False), ("gloo", True)])
def test_samples_are_not_compared_with_the_steps_of_later_runs(
    client: TestClient, backend: str, phases: bool
) -> None:
    send(client, backend, [], [one for rank in range(4) for one in measured(rank)])
    service = client.app.state.service  # type: ignore[attr-defined]
    with service.reader.connect() as connection:
        found = _summary(connection, "job", {}, POLICY)
    assert found is not None
    assert found.step_ms == pytest.approx(100.0)
    assert bool(found.phases_ms) == phases
