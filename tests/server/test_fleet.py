"""All runs together: live ones, hosts over runs, hours by week, silent agents."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.api.fleet import queries
from rankscope_server.api.fleet.hosts import Named, Run, counts, hosts_over_runs, worst_host
from rankscope_server.api.fleet.weeks import (
    KEPT,
    LOST,
    OTHER,
    UNKNOWN,
    Spent,
    Use,
    by_week,
    monday_of,
)
from rankscope_server.store import tables
from rankscope_server.verdict.cost import PARTS
from tests.server.conftest import Sender, TestClient, poster
from tests.server.seed import seed_with

DAY = 86_400 * 10**9
NODES = frozenset({"a", "b", "c", "d"})


def run(name: str, hosts: frozenset[str] = NODES, began: int = 1) -> Run:
    return Run(name, name, began, hosts)


def slow(run_id: str, *hosts: str, kind: str = "slow_compute") -> Named:
    return Named(1, run_id, kind, "slow", hosts)


def test_a_host_is_compared_over_its_runs() -> None:
    runs = [run(f"r{at}", began=at) for at in range(5)]
    found = hosts_over_runs(runs, [slow(f"r{at}", "b") for at in range(4)])
    assert [(host.host, host.num_slow, host.num_runs) for host in found] == [
        ("b", 4, 5), ("a", 0, 5), ("c", 0, 5), ("d", 0, 5),
    ]  # fmt: skip
    assert [one.run_id for one in found[0].named] == ["r3", "r2", "r1", "r0"]
    worst = worst_host(found)
    assert worst is not None
    assert worst.host == "b"


def test_a_hang_counts_against_the_host_that_it_names() -> None:
    found = hosts_over_runs([run("r")], [slow("r", "b", kind="hang")] * counts("hang"))
    assert [(host.host, host.num_failed, host.num_slow) for host in found[:2]] == [
        ("b", 1, 0), ("a", 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ([run("r", frozenset({"b"}))] * 3, [slow("r", "b")]),  # alone: the job, or the host?
        ([run("r")], [slow("r", "a", "b", "c")]),  # most of them: it is about the run
        ([run("r")], [slow("other", "b")]),  # of a run that is not looked at
        ([], [slow("r", "b")]),
    ],
)
def test_no_host_is_accused_where_nothing_says_that_it_was(
    runs: list[Run], named: list[Named]
) -> None:
    found = hosts_over_runs(runs, named)
    assert all(host.num_slow == 0 and host.named == [] for host in found)
    assert worst_host(found) is None


def test_once_is_no_habit() -> None:
    runs = [run(f"r{at}") for at in range(5)]
    once = hosts_over_runs(runs[:1], [slow("r0", "b")])
    assert once[0].num_slow == 1
    assert worst_host(once) is None
    seldom = hosts_over_runs(runs, [slow("r0", "b"), slow("r1", "b")])
    assert worst_host(seldom) is None, "2 of 5"
    twice = hosts_over_runs(runs[:3], [slow("r0", "b"), slow("r0", "b"), slow("r1", "b")])
    assert (twice[0].num_slow, twice[0].num_named) == (2, 3), "a run counts once"


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["slow_compute", "crash"]),
                  st.integers(0, 5)),
        max_size=30,
    )
)  # fmt: skip
def test_counts_are_never_more_than_the_runs(rows: Sequence[tuple[str, str, int]]) -> None:
    runs = [run(f"r{at}", frozenset("abcd"), at) for at in range(4)]
    named = [slow(f"r{at}", host, kind=kind) for host, kind, at in rows]
    for host in hosts_over_runs(runs, named):
        assert 0 <= host.num_slow <= host.num_runs <= len(runs)
        assert 0 <= host.num_failed <= host.num_runs
        assert len(host.named) <= host.num_named <= len(rows)


def test_weeks_begin_on_monday_and_the_empty_ones_are_there() -> None:
    now = int(dt.datetime(2026, 11, 28, 1, tzinfo=dt.UTC).timestamp()) * 10**9
    assert monday_of(now) == dt.datetime(2026, 11, 23, tzinfo=dt.UTC)
    parts = dict.fromkeys(PARTS, 0.0) | {"productive": 3600.0, "restart": 1800.0}
    cost = {"parts": parts}
    runs = [Spent(now, cost), Spent(now - 7 * DAY, None), Spent(now - 70 * DAY, cost)]
    weeks = by_week(runs, now, 3)
    assert [(week.num_runs, week.num_unknown) for week in weeks] == [(0, 0), (1, 1), (1, 0)]
    assert (weeks[2].kept_rank_hours, weeks[2].lost_rank_hours) == (1.0, 0.5)
    assert weeks[1].rank_hours == 0.0


def test_a_week_says_what_was_lost_to_what_by_project_and_how_busy_machines_were() -> None:
    now = int(dt.datetime(2026, 11, 28, 1, tzinfo=dt.UTC).timestamp()) * 10**9
    parts = dict.fromkeys(PARTS, 0.0)
    first = {"parts": parts | {"productive": 7200.0, "straggling": 1800.0, "restart": 3600.0}}
    second = {"parts": parts | {"productive": 36000.0, "communication": 3600.0}}
    runs = [
        Spent(now, first, "a", is_live=True, gpu=Use(100, 90), cpu=Use(300, 30)),
        Spent(now, second, "b", gpu=Use(300, 60)),
        Spent(now, None, "b"),
        Spent(now - 7 * DAY, None, "a", cpu=Use(0, 0)),
    ]
    before, week = by_week(runs, now, 2)
    assert (before.is_over, week.is_over) == (True, False)
    assert (before.gpu_utilization_ratio, before.cpu_utilization_ratio) == (None, None)
    assert (before.num_runs, before.num_unknown, before.rank_hours) == (1, 1, 0.0)
    assert (week.num_runs, week.num_unknown, week.num_live) == (3, 1, 1)
    assert week.productive_rank_hours == 12.0
    assert (week.kept_rank_hours, week.lost_rank_hours) == (13.0, 1.5)
    assert {name for name in week.lost_by_cause} == LOST
    lost = {name: hours for name, hours in week.lost_by_cause.items() if hours}
    assert lost == {"straggling": 0.5, "restart": 1.0}
    assert (week.gpu_utilization_ratio, week.num_gpu_known) == (150 / 400, 2)
    assert (week.cpu_utilization_ratio, week.num_cpu_known) == (0.1, 1)
    assert [(one.project, one.rank_hours, one.num_live) for one in week.projects] == [
        ("b", 11.0, 0), ("a", 3.5, 1),
    ]  # fmt: skip
    assert week.projects[0].cpu_utilization_ratio is None


def test_each_part_is_in_one_group() -> None:
    groups = (KEPT, LOST, OTHER, UNKNOWN)
    assert sorted(name for group in groups for name in group) == sorted(PARTS)


def looked(client: TestClient) -> Any:
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    reply = client.get("/api/v1/fleet")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_hours_are_those_of_the_pages_of_the_runs(seeded: Sender) -> None:
    shown = looked(seeded.client)
    cost = seeded.get("/cost")
    began = seeded.get("")["run"]["started_ms"]
    weeks = [week for week in shown["weeks"] if week["num_runs"]]
    if began < shown["weeks"][0]["begin_ms"]:  # the seed has a fixed date
        assert weeks == []
        shown = seeded.client.get("/api/v1/fleet?weeks=26").json()
        weeks = [week for week in shown["weeks"] if week["num_runs"]]
    parts = ("kept", "lost", "other", "unknown")
    for week in shown["weeks"]:
        assert sum(week[f"{part}_rank_hours"] for part in parts) == pytest.approx(
            week["rank_hours"], rel=1e-9
        )
    for week in weeks:
        assert week["rank_hours"] == pytest.approx(cost["rank_hours"], rel=1e-9)


def started(client: TestClient, name: str, hosts: Sequence[str], began_ns: int) -> Sender:
    sender = Sender(client, name)
    who = {"attempt": 0, "time_ns": began_ns}
    sender.send(
        schema.RunStarted(
            **who, rank=-1, name=name, world_size=len(hosts), command=["x"], launcher="", tags={}
        ),
        *(
            schema.RankRegistered(
                **who, rank=rank, host=host, pid=rank + 1, world_size=len(hosts), local_rank=0,
                local_world_size=1, node_rank=rank,
            )
            for rank, host in enumerate(hosts)
        ),
    )  # fmt: skip
    return sender


def change(client: TestClient, *statements: Any) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    for one in statements:
        service.writer.run(lambda unit, one=one: unit.connection.execute(one))


def sampled(kind: str, times_s: Sequence[float], began_ns: int, **columns: Any) -> Any:
    """Return samples of node-a at these times, one a second as a rule."""
    count = len(times_s)
    values: dict[str, Any] = {
        name: np.full(count, -1, np.float32 if name in schema.FLOAT_COLUMNS else np.int64)
        for name in schema.CHUNK_COLUMNS[kind]
    }
    times = began_ns + (np.array(times_s) * 1e9).astype(np.int64)
    values |= {"time_ns": times, "interval_ns": np.full(count, 10**9)}
    values |= {name: np.asarray(column, values[name].dtype) for name, column in columns.items()}
    return schema.Chunk(
        kind=kind, attempt=0, rank=-1, host="node-a", count=count, time_lo_ns=int(times[0]),
        time_hi_ns=int(times[-1]), data=encode_chunk(values),
    )  # type: ignore[arg-type]  # fmt: skip


def counters(times_s: Sequence[float], began_ns: int, us: Sequence[float]) -> Any:
    """Return processors that were busy for so long in all at these times, half of it as system."""
    half = [int(value) // 2 for value in us]
    return sampled("host", times_s, began_ns, cpu_user_us_total=half, cpu_system_us_total=half)


def utilisation(client: TestClient) -> tuple[float | None, float | None]:
    weeks = [week for week in client.get("/api/v1/fleet").json()["weeks"] if week["num_runs"]]
    (week,) = weeks
    return week["gpu_utilization_ratio"], week["cpu_utilization_ratio"]


def test_how_busy_machines_were_is_added_up_as_samples_come(client: TestClient) -> None:
    now = time.time_ns()
    began = now - 60 * 10**9
    sender = started(client, "r", ("node-a",), began)
    assert utilisation(client) == (None, None)
    gpus = sampled("gpu", [0, 0, 1, 1], began, gpu=[0, 1, 0, 1],
                   utilization_ratio=[1.0, 0.0, 0.5, -1.0])  # fmt: skip
    first = sender.body(chunks=[gpus])
    assert client.post("/api/v1/ingest", content=first).status_code == 200
    assert client.post("/api/v1/ingest", content=first).status_code == 200, "sent twice"
    assert utilisation(client) == (pytest.approx(1.5 / 3), None)
    # One sample in each batch: the time between two batches is known all the same.
    sender.send(chunks=[counters([0], began, [10e6])])
    assert utilisation(client)[1] is None
    sender.send(chunks=[counters([2], began, [11e6])])
    assert utilisation(client)[1] == pytest.approx(0.5)
    sender.send(chunks=[counters([4, 6], began, [13e6, 15e6])])
    assert utilisation(client)[1] == pytest.approx(5 / 6)
    # A machine that was started again counts anew; what is too far apart is not known.
    sender.send(chunks=[counters([8, 10], began, [1e6, 1e6])])
    assert utilisation(client)[1] == pytest.approx(5 / 8)
    sender.send(chunks=[counters([1000], began, [900e6])])
    assert utilisation(client)[1] == pytest.approx(5 / 8)
    assert utilisation(client)[0] == pytest.approx(0.5)
    (week,) = [one for one in client.get("/api/v1/fleet").json()["weeks"] if one["num_runs"]]
    assert (week["num_gpu_known"], week["num_cpu_known"], week["num_live"]) == (1, 1, 1)
    assert [one["project"] for one in week["projects"]] == ["default"]


def accused(run_id: str, host: str, severity: str = "critical") -> Any:
    body = {"kind": "slow_compute", "severity": severity, "hosts": [host], "what": f"{host} slow"}
    return sa.insert(tables.finding).values(
        run_id=run_id, attempt=0, key=run_id, state="recovered", opened_ns=1,
        body=msgspec.json.encode(body).decode(),
    )  # fmt: skip


def test_what_is_stored_of_all_runs(client: TestClient) -> None:
    now = time.time_ns()
    for at in range(5):
        started(client, f"r{at}", ("node-a", "node-b", "node-c"), now - (5 - at) * 10**9)
    started(client, "alone", ("node-x",), now)
    change(
        client,
        *(accused(f"r{at}", "node-b") for at in range(4)),
        accused("r4", "node-c", "info"),  # of little weight
        accused("alone", "node-x"),
        sa.update(tables.run).values(status="running", received_ns=now),
        sa.update(tables.run).where(tables.run.c.run_id == "r0").values(status="ended"),
        sa.update(tables.run).where(tables.run.c.run_id == "r1").values(received_ns=now - 2 * DAY),
        sa.update(tables.run)
        .where(tables.run.c.run_id == "r2")
        .values(status="stuck", status_text="in a collective"),
        sa.update(tables.rank)
        .where(tables.rank.c.run_id == "r3", tables.rank.c.host == "node-c")
        .values(received_ns=now - 600 * 10**9),
    )
    shown = client.get("/api/v1/fleet").json()
    assert shown["text"] == (
        "1 of 4 live runs needs attention; ranks of 1 host are silent; "
        "node-b was slow in 4 of 5 runs"
    )
    assert [one["run_id"] for one in shown["live"]] == ["r2", "alone", "r4", "r3"]
    assert shown["num_quiet"] == 1
    (silent,) = shown["silent"]
    assert (silent["run_id"], silent["host"], silent["num_silent"]) == ("r3", "node-c", 1)
    hosts = {one["host"]: one for one in shown["hosts"]}
    assert {name: (one["num_slow"], one["num_runs"]) for name, one in hosts.items()} == {
        "node-a": (0, 5), "node-b": (4, 5), "node-c": (0, 5), "node-x": (0, 0),
    }  # fmt: skip
    assert hosts["node-x"]["num_alone"] == 1
    assert [one["run_id"] for one in hosts["node-b"]["named"]] == ["r3", "r2", "r1", "r0"]
    assert shown["weeks"][-1]["num_runs"] + shown["weeks"][-2]["num_runs"] == 6
    assert sum(week["num_unknown"] for week in shown["weeks"]) == 6
    assert (shown["runs_capped"], shown["weeks_capped"], shown["live_capped"]) == (None,) * 3
    assert client.get("/api/v1/fleet?weeks=0").status_code == 422
    table = client.get("/api/v1/fleet?format=csv").text
    assert table.splitlines()[0].startswith("host,num_runs")


def test_of_no_run_it_says_so(client: TestClient) -> None:
    shown = client.get("/api/v1/fleet").json()
    assert shown["text"] == "No run is live"
    assert (shown["live"], shown["hosts"], shown["silent"]) == ([], [], [])
    assert len(shown["weeks"]) == 8


def test_what_was_cut_is_said(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_LIVE", 2), ("MAX_COMPARED", 3), ("MAX_SUMMED", 4), ("MAX_HOSTS", 1)):
        monkeypatch.setattr(queries, name, most)
    now = time.time_ns()
    for at in range(5):
        started(client, f"r{at}", ("node-a", "node-b"), now - at)
    change(client, sa.update(tables.run).values(status="running", received_ns=now))
    shown = client.get("/api/v1/fleet").json()
    assert shown["live_capped"] == {"shown": 2, "total": 5}
    assert [one["run_id"] for one in shown["live"]] == ["r0", "r1"]
    assert shown["text"].startswith("5 live runs")
    assert shown["runs_capped"] == {"shown": 3, "total": 5}
    assert shown["weeks_capped"] == {"shown": 4, "total": 5}
    assert shown["hosts_capped"] == {"shown": 1, "total": 2}
    assert shown["hosts"][0]["num_runs"] == 3


def test_a_seeded_run_is_live_and_needs_attention(client: TestClient) -> None:
    run_id = seed_with(poster(client), steps=100, end=False, start_ns=time.time_ns() - 60 * 10**9)
    shown = looked(client)
    (live,) = [one for one in shown["live"] if one["run_id"] == run_id]
    assert live["needs_attention"]
    found = client.get(f"/api/v1/runs/{run_id}").json()
    assert live["sentence"] == found["answer"]["text"]
    assert live["sentence"].endswith(found["verdict"]["what"])
    cost = client.get(f"/api/v1/runs/{run_id}/cost").json()
    assert live["productive_share"] == pytest.approx(cost["parts"][0]["share"], rel=1e-9)
