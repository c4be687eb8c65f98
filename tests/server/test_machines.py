"""Samples become series with their gaps, and events of machines their page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from tests.server.conftest import Sender
from tests.server.seed import sample_columns

S = 10**9
NOW = 1_700_000_000 * S


def send_samples(sender: Sender, kind: Any, at: list[int], **told: Any) -> None:
    times = NOW + np.array(at, np.int64) * S
    columns = sample_columns(kind, times, {name: np.asarray(v) for name, v in told.items()})
    sender.send(chunks=[chunk_of(kind, columns, len(at))])


def chunk_of(kind: Any, columns: Any, count: int) -> schema.Chunk:
    times = columns["time_ns"]
    return schema.Chunk(
        kind=kind, attempt=0, rank=schema.NODE_RANK, host="node-a", count=count,
        time_lo_ns=int(times[0]), time_hi_ns=int(times[-1]), data=encode_chunk(columns),
    )  # fmt: skip


def series(sender: Sender, kind: str, name: str, **params: Any) -> dict[str, Any]:
    found = sender.get("/samples", kind=kind, names=name, **params)["series"]
    assert len(found) == 1
    only: dict[str, Any] = found[0]
    return only


def test_a_gauge_keeps_its_values_and_what_is_not_known_is_null(sender: Sender) -> None:
    send_samples(sender, "host", [0, 1, 2], memory_used_bytes=[5, -1, 7])
    used = series(sender, "host", "memory_used_bytes")
    assert (used["unit"], used["min"], used["max"]) == ("bytes", [5, None, 7], [5, None, 7])


def test_a_counter_is_told_as_its_rate_over_chunks_in_any_order(sender: Sender) -> None:
    send_samples(sender, "tcp", [2, 3], retransmitted_segments_total=[40, 50])
    send_samples(sender, "tcp", [0, 1], retransmitted_segments_total=[10, 20])
    rate = series(sender, "tcp", "retransmitted_segments_total")
    assert (rate["name"], rate["unit"]) == ("retransmitted_segments", "1/s")
    assert rate["max"] == [None, 10, 20, 10]


@pytest.mark.parametrize(
    ("kind", "name", "told", "unit", "rate"),
    [
        ("host", "cpu_user_us_total", [0, 250_000], "ratio", 0.25),
        ("gpu", "energy_mj_total", [0, 400_000], "W", 400),
        ("nic", "sent_bytes_total", [100, 1100], "bytes/s", 1000),
        ("nic", "link_mbps", [-1, 100_000], "bit/s", 1e11),
        ("gpu", "sm_clock_mhz", [-1, 1_980], "Hz", 1.98e9),
    ],
)
def test_units_of_rates(
    sender: Sender, kind: str, name: str, told: list[int], unit: str, rate: float
) -> None:
    send_samples(sender, kind, [0, 1], **{name: told})
    found = series(sender, kind, name)
    assert (found["unit"], found["max"]) == (unit, [None, pytest.approx(rate)])


def test_a_counter_that_began_anew_has_no_rate_there(sender: Sender) -> None:
    send_samples(sender, "tcp", [0, 1, 2], sent_segments_total=[900, 5, 7])
    assert series(sender, "tcp", "sent_segments_total")["max"] == [None, None, 2]


def test_lost_samples_are_a_gap_and_rare_ones_are_not(sender: Sender) -> None:
    send_samples(sender, "host", [0, 1, 9, 10], num_cpus=[4] * 4)
    lost = series(sender, "host", "num_cpus")
    assert lost["max"] == [4, 4, None, 4, 4]
    assert lost["time_ms"][2] == (NOW + 5 * S) / 1e6
    send_samples(sender, "nic", [0, 1, 9, 10], sent_bytes_total=[0, 100, 900, 1000])
    assert series(sender, "nic", "sent_bytes_total")["max"] == [None, 100, None, None, 100]
    times = NOW + np.array([0, 8, 16], np.int64) * S
    slow = sample_columns("pressure", times, {"cpu_some_us_total": np.array([0, 80, 160]) * 10**5})
    slow["interval_ns"] = np.full(3, 8 * S)
    sender.send(chunks=[chunk_of("pressure", slow, 3)])
    assert series(sender, "pressure", "cpu_some_us_total")["max"] == [None, 1.0, 1.0]


def test_narrow_charts_keep_extremes_and_wide_gaps(sender: Sender) -> None:
    at = [*range(100), *range(200, 300)]
    send_samples(sender, "host", at, runnable=np.arange(200))
    found = series(sender, "host", "runnable", width=10)
    assert (min(x for x in found["min"] if x is not None), max(found["max"][-1:])) == (0, 199)
    assert found["max"].count(None) == 1
    assert len(found["max"]) <= 11


def test_rows_of_several_things_are_kept_apart_and_named(sender: Sender) -> None:
    times = np.repeat(NOW + np.arange(2, dtype=np.int64) * S, 2)
    told = {
        "gpu": np.array([0, 1, 0, 1]),
        "link": np.array([3, 3, 3, 3]),
        "is_up": np.array([1, 0, 1, 1]),
    }
    sender.send(chunks=[chunk_of("nvlink", sample_columns("nvlink", times, told), 4)])
    found = sender.get("/samples", kind="nvlink", names="is_up")["series"]
    assert [(one["label"], one["gpu"], one["max"]) for one in found] == [
        ("GPU 0, link 3", 0, [1, 1]),
        ("GPU 1, link 3", 1, [0, 1]),
    ]


def test_a_machine_at_its_limits_is_the_first_thing_said(sender: Sender) -> None:
    seconds = list(range(20))
    micros = 10**6 * np.array(seconds)
    send_samples(sender, "host", seconds, cpu_idle_us_total=micros * 0.5)
    assert "limit" not in sender.get("/machines")["text"]
    later = [one + 600 for one in seconds]
    send_samples(sender, "host", later, cpu_idle_us_total=micros * 0.01)
    send_samples(sender, "pressure", later, cpu_some_us_total=micros * 0.8, io_full_us_total=0)
    assert sender.get("/machines")["text"] == (
        "node-a: its processors are 99 % busy, tasks wait for a processor 80 % of the time, in the "
        "newest 5 minutes. 1 machine: none reported a hardware error or a kill for memory."
    )


def test_every_kind_is_stored_and_listed(sender: Sender) -> None:
    from rankscope.wire.sample_columns import SAMPLE_COLUMNS

    for kind in SAMPLE_COLUMNS:
        send_samples(sender, kind, [0, 1])
        assert sender.get("/samples", kind=kind)["series"]
    (machine,) = sender.get("/machines")["machines"]
    assert machine["kinds"] == sorted(SAMPLE_COLUMNS)
    assert machine["last_ms"] == (NOW + S) / 1e6


def test_what_an_older_agent_does_not_send_is_not_known(sender: Sender) -> None:
    times = NOW + np.arange(2, dtype=np.int64) * S
    columns = sample_columns("process", times, {"rank": 0, "pid": 7, "num_threads": 3})
    del columns["stopped_by"]
    sender.send(chunks=[chunk_of("process", columns, 2)])
    found = sender.get("/samples", kind="process", names="stopped_by,num_threads")["series"]
    assert [(one["name"], one["max"]) for one in found] == [
        ("stopped_by", [None, None]), ("num_threads", [3, 3]),
    ]  # fmt: skip


def test_an_unknown_kind_says_which_there_are(seeded: Sender) -> None:
    reply = seeded.client.get(f"/api/v1/runs/{seeded.run_id}/samples", params={"kind": "x"})
    assert reply.status_code == 422
    assert "infiniband" in reply.json()["error"]["remedy"]


def test_machines_of_a_seeded_run(seeded: Sender) -> None:
    page = seeded.get("/machines")
    assert [machine["host"] for machine in page["machines"]] == ["node-a", "node-b"]
    assert [machine["ranks"] for machine in page["machines"]] == [[0, 1], [2, 3]]
    sources = {one["source"]: one for one in page["machines"][0]["sources"]}
    assert sources["nic"] == {"source": "nic", "state": "works", "reason": ""}
    assert sources["infiniband"]["state"] == "skipped"
    assert sources["infiniband"]["reason"].startswith("no port in /sys/class/infiniband")
    assert page["machines"][0]["gpus"][1]["slowed"] == {"power cap (software)": 1.0}
    assert page["events"] == []
    assert page["text"] == "2 machines: none reported a hardware error or a kill for memory."
    host = seeded.get("/samples", names="cpu_user_us_total", width=5)
    assert host["hosts"] == ["node-a", "node-b"]
    assert all(0.5 < max(x for x in one["max"] if x is not None) < 0.7 for one in host["series"])


def event(name: str, rank: int = schema.NODE_RANK, second: int = 0, **fields: str) -> schema.Event:
    return schema.Event(attempt=0, rank=rank, time_ns=NOW + second * S, name=name, fields=fields)


def test_the_worst_event_stands_in_the_sentence(sender: Sender) -> None:
    sender.send(
        event("xid", rank=3, host="node-b", gpu="3", number="79", meaning="fallen off the bus"),
        event("link down", second=1, host="node-a", device="eth0"),
        event("checkpoint", second=2),
    )
    page = sender.get("/machines")
    assert page["text"] == "node-b: GPU 3: Xid 79, fallen off the bus, and 1 other event."
    assert [(one["name"], one["host"], one["rank"]) for one in page["events"]] == [
        ("link down", "node-a", None),
        ("xid", "node-b", 3),
    ]


def test_the_newest_states_of_the_sources_count(sender: Sender) -> None:
    sender.send(
        event("machine sources", second=2, host="a", **{"source.gpu": "stuck: no answer for 30 s"})
    )
    sender.send(event("machine sources", second=1, host="a", **{"source.gpu": "works"}))
    page = sender.get("/machines")
    assert page["machines"][0]["sources"] == [
        {"source": "gpu", "state": "stuck", "reason": "no answer for 30 s"}
    ]
    assert page["text"].endswith("Not sampled: gpu on a.")
