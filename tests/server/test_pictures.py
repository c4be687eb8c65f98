"""What findings look like, from what is stored: the fault is seen in the picture, and gaps are."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.api.pictures.registry import PICTURES
from rankscope_server.api.pictures.subject import MAX_OTHERS
from rankscope_server.findings.kinds import KINDS
from rankscope_server.retention.marks import mark
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from tests.server.conftest import DATABASES, Sender, TestClient, new_data, poster
from tests.server.jobs_sent import send_job
from tests.server.seed import seed_with
from tests.simulator.connections import LOSSY, ONSET_S, SLOW, START_S, Net, everybody
from tests.simulator.job import Fault, Job, Noise

RANK, START = 5, 60
START_NS = 1_790_000_000_000_000_000
pytestmark = pytest.mark.parametrize("database_url", DATABASES[:1], indirect=True)


def picture_of(sender: Sender, kind: str) -> dict[str, Any]:
    """Return the first finding of a kind with its picture."""
    sender.client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    found = sender.get("/findings")
    listed = [one for one in (*found["open"], *found["recovered"]) if one["kind"] == kind]
    assert listed, [one["kind"] for one in found["open"]]
    finding: dict[str, Any] = listed[0]
    return finding | {"picture": sender.get(f"/findings/{finding['id']}/picture")}


def sides(chart: dict[str, Any], line: int = 0) -> tuple[list[float], list[float]]:
    """Return the known values of a named line before the onset, and since."""
    values = np.array([np.nan if v is None else v for v in chart["lines"][line]["values"]])
    since = np.array(chart["x"]) >= chart["onset"]
    return [
        [value for value in values[side].tolist() if value == value] for side in (~since, since)
    ]  # type: ignore[return-value]


def job(kind: Any, **more: Any) -> Job:
    fault = Fault(kind, rank=RANK, start=START, **more)
    return Job(data=8, steps=160, tells_numbers=True, ranks_per_host=4, seed=2, faults=(fault,))


def test_a_loss_that_is_no_number_is_a_gap_at_the_onset(sender: Sender) -> None:
    send_job(poster(sender.client), "run", job("nan"))
    found = picture_of(sender, "nan")
    assert (found["ranks"], found["onset_step"]) == ([RANK], START)
    charts = {chart["key"]: chart for chart in found["picture"]["charts"]}
    loss = charts["loss"]
    assert [line["label"] for line in loss["lines"]] == [f"rank {RANK}"]
    assert loss["others"] == "the 7 other ranks"
    assert loss["axis"] == "step"
    before, since = sides(loss)
    assert len(before) == START - max(1, START - 60)
    assert since == []
    at = loss["x"].index(START)
    assert loss["median"][at] is not None, "the others still had one in the first step"
    assert loss["median"][at + 1] is None
    assert "rank 5 had no value since the onset" in loss["text"]
    assert set(charts) == {"loss", "gradient_norm_local", "gradient_norm"}


def test_memory_that_grows_leaves_the_band(sender: Sender) -> None:
    send_job(poster(sender.client), "run", job("leak", size=40.0))
    found = picture_of(sender, "memory_growth")
    (chart,) = found["picture"]["charts"]
    assert (chart["key"], chart["unit"]) == ("rss_bytes", "bytes")
    values = chart["lines"][0]["values"]
    grown = (values[-1] - chart["high"][-1]) / (1 << 20)
    assert grown == pytest.approx(40 * (160 - START), rel=0.05)
    early = chart["x"].index(40)
    assert values[early] < chart["high"][early] * 1.1


def test_a_clock_that_is_set_moves_its_steps(sender: Sender) -> None:
    fault = Fault("clock_set", host=1, start=START, size=1500.0)
    set_late = Job(
        data=8, steps=120, ranks_per_host=2, seed=2, faults=(fault,), noise=Noise(hiccup_share=0.0)
    )
    send_job(poster(sender.client), "run", set_late, collectives=True)
    found = picture_of(sender, "clock_offset")
    chart = found["picture"]["charts"][0]
    assert (chart["key"], chart["unit"]) == ("started", "ms")
    assert {line["label"] for line in chart["lines"]} == {"rank 2", "rank 3"}
    values = np.array(chart["lines"][0]["values"], float)
    steps = np.array(chart["x"])
    assert np.abs(values[steps < START - 1]).max() < 100
    assert values[steps > START + 1] == pytest.approx(1500.0, abs=100)
    assert max(abs(value) for value in chart["high"]) < 100


def test_heat_is_seen_beside_the_other_gpus(sender: Sender) -> None:
    send_job(poster(sender.client), "run", job("thermal", size=0.6))
    found = picture_of(sender, "thermal_or_power")
    charts = {chart["key"]: chart for chart in found["picture"]["charts"]}
    clock = charts["gpu_clock"]
    assert clock["axis"] == "time"
    assert clock["lines"][0]["label"].startswith("GPU ")
    assert clock["onset"] == pytest.approx(found["onset_ms"])


def stored(sender: Sender, **body: Any) -> int:
    """Store a finding as a detector returns it; return its id."""
    whole = {
        "key": f"0/slow-link/{body.get('kind')}", "detector": "slow-link", "severity": "warning",
        "attempt": 0, "what": "what", "why": "why", "next": "", "confidence": 0.5,
        "confidence_text": "low", "would_be_wrong_if": "", "policy_hash": "", "state": "open",
    } | body  # fmt: skip
    service = sender.client.app.state.service  # type: ignore[attr-defined]

    def write(unit: Any) -> int:
        values = {
            "run_id": sender.run_id, "attempt": 0, "key": whole["key"], "state": "open",
            "opened_ns": 1, "updated_ns": 1, "body": msgspec.json.encode(whole).decode(),
        }  # fmt: skip
        unit.connection.execute(sa.insert(tables.finding).values(**values))
        return int(unit.connection.scalar(sa.select(sa.func.max(tables.finding.c.id))))

    return int(service.writer.run(write))


def sampled_each_2s(chunk: schema.Chunk, columns: dict[str, Any]) -> schema.Chunk:
    interval = np.full(chunk.count, 2 * 10**9)
    return msgspec.structs.replace(chunk, data=encode_chunk(columns | {"interval_ns": interval}))


@pytest.mark.parametrize(("traffic", "key"), [(SLOW, "sending"), (LOSSY, "again")])
def test_a_link_that_is_slow_or_loses_is_seen(sender: Sender, traffic: Any, key: str) -> None:
    pairs = everybody(4)
    net = Net(4, pairs, bad={pair: traffic for pair in pairs if pair[0] == 1}, per_host=2)
    sender.send(
        *(
            schema.RankRegistered(
                attempt=0, rank=rank, time_ns=int(START_S * 1e9), world_size=4, local_rank=rank % 2,
                local_world_size=2, node_rank=rank // 2, host=net.host(rank), pid=rank + 1,
            )
            for rank in range(4)
        ),
        chunks=[sampled_each_2s(*item) for _, item in net.items()],
    )  # fmt: skip
    onset_ms = (START_S + ONSET_S) * 1e3
    number = stored(sender, kind="slow_link", ranks=[1], hosts=["node0"], onset_ms=onset_ms)
    charts = {chart["key"]: chart for chart in sender.get(f"/findings/{number}/picture")["charts"]}
    chart = charts[key]
    assert chart["onset"] == onset_ms
    before, since = (float(np.median(side)) for side in sides(chart))
    if key == "sending":
        assert since < 0.1 * before
    else:
        assert since == pytest.approx(traffic.lost, rel=0.2)
        assert before < 0.001
    band = np.array(chart["median"][-10:], float)
    assert np.median(band) == pytest.approx(before, rel=0.3, abs=1e-3)


def test_where_nothing_is_stored_it_is_said(sender: Sender) -> None:
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=1, name="run"))
    nothing: dict[str, list[Any]] = {"charts": [], "bars": [], "lanes": [], "tables": []}
    for kind, sources in PICTURES.items():
        number = stored(sender, kind=kind, key=f"0/x/{kind}", ranks=[0], hosts=["node-a"])
        reason = "; ".join(dict.fromkeys(source.lacks for source in sources))
        assert sender.get(f"/findings/{number}/picture") == nothing | {
            "notes": [], "reason": reason,
        }  # fmt: skip
    number = stored(sender, kind="of_a_later_version", key="0/x/later")
    reason = "this version of the server does not know its kind"
    assert sender.get(f"/findings/{number}/picture") == nothing | {"notes": [], "reason": reason}
    missing = sender.client.get("/api/v1/runs/run/findings/99999/picture")
    assert missing.status_code == 404


def test_every_kind_has_a_picture_and_may_lack_it(database_url: str) -> None:
    assert set(PICTURES) <= {known.id for known in KINDS}  # others have the plain one
    assert all(sources for sources in PICTURES.values())
    assert all(source.lacks for sources in PICTURES.values() for source in sources)


def test_a_kind_without_a_picture_of_its_own_has_self_time(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(PICTURES, "slow_data")
    send_job(poster(sender.client), "run", gloo("slow_data", size=0.6))
    found = picture_of(sender, "slow_data")
    assert [chart["key"] for chart in found["picture"]["charts"]] == ["own_work"]


def gloo(kind: Any, **more: Any) -> Job:
    """Return a job of which each rank knows its waits itself."""
    return dataclasses.replace(job(kind, **more), backend="gloo")


def parts_of(found: dict[str, Any], shape: str) -> dict[str, Any]:
    return {part["key"]: part for part in found["picture"][shape]}


@pytest.mark.parametrize(
    ("fault", "kind", "charts"),
    [
        ("slow_compute", "slow_compute", {"own_work": 36}),
        ("slow_data", "slow_data", {"data": 36}),
        ("garbage", "garbage_collection", {"own_work": 36, "gc_ns": 36}),
        ("page_cache", "page_cache", {"data": 36, "major_faults": 25}),
        ("contention", "host_contention", {"own_work": 36, "involuntary_switches": 40}),
    ],
)
def test_a_slow_rank_and_why_it_is_slow_leave_the_band(
    sender: Sender, fault: Any, kind: str, charts: dict[str, float]
) -> None:
    send_job(poster(sender.client), "run", gloo(fault, size=0.6))
    found = picture_of(sender, kind)
    drawn = parts_of(found, "charts")
    assert set(drawn) == set(charts)
    for key, more in charts.items():
        chart = drawn[key]
        assert [line["label"] for line in chart["lines"]] == [f"rank {RANK}"]
        assert chart["onset"] == START
        assert chart["source"]
        before, since = (float(np.median(side)) for side in sides(chart))
        assert since - before == pytest.approx(more, rel=0.1)
        known = np.array([np.nan if v is None else v for v in chart["median"]])
        assert np.nanmedian(known) == pytest.approx(before, rel=0.1, abs=0.5)


def test_of_what_all_ranks_do_the_slowest_is_drawn(sender: Sender) -> None:
    send_job(poster(sender.client), "run", gloo("slow_loader", size=0.6))
    found = picture_of(sender, "slow_data")
    assert found["ranks"] == []
    (chart,) = found["picture"]["charts"]
    assert [line["label"] for line in chart["lines"]] == ["the slowest rank"]
    assert chart["others"] == "the 8 ranks"


def test_a_crash_is_a_mark_before_its_echoes(sender: Sender) -> None:
    send_job(poster(sender.client), "run", gloo("crash"))
    (part,) = picture_of(sender, "crash")["picture"]["lanes"]
    lanes = {lane["label"]: lane for lane in part["lanes"]}
    assert part["lanes"][0]["label"] == f"rank {RANK}"
    assert [lane["is_named"] for lane in part["lanes"]] == [True, *[False] * 6]
    errors = {
        label: next(span for span in lane["spans"] if span["state"] == "event")
        for label, lane in lanes.items()
    }
    first = errors.pop(f"rank {RANK}")
    assert "illegal memory access" in first["text"]
    assert all("Connection closed" in echo["text"] for echo in errors.values())
    assert min(echo["begin_ms"] for echo in errors.values()) > first["begin_ms"]
    assert re.search(rf"rank {RANK} was [\d.]+ m?s before the next one", part["text"])
    assert part["others"] == "6 of the 7 other ranks"
    assert f"Rank {RANK} ended step {START - 1} last" in part["text"]
    assert all(
        part["begin_ms"] <= span["begin_ms"] <= span["end_ms"] <= part["end_ms"]
        for lane in part["lanes"] for span in lane["spans"]
    )  # fmt: skip


def test_of_a_hang_it_is_seen_who_waits_and_who_does_not_come(client: TestClient) -> None:
    run_id = seed_with(poster(client), fault="hang", steps=100, slow_rank=2,
                       start_ns=time.time_ns() - 600 * 10**9)  # fmt: skip
    found = picture_of(Sender(client, run_id), "hang")
    (part,) = found["picture"]["lanes"]
    last = {lane["label"]: lane["spans"][-1] for lane in part["lanes"]}
    named = last.pop("rank 2")
    step = found["onset_step"]
    assert (named["state"], named["text"]) == ("inside", f"in data of step {step}, in no call")
    assert {(span["state"], span["text"]) for span in last.values()} == {
        ("waits", f"in all_reduce {3 * step - 2} of default_pg")
    }
    assert f"Rank 2 ended step {step - 1} last" in part["text"]


def test_of_a_desync_each_call_stands_with_its_ranks(sender: Sender) -> None:
    send_job(poster(sender.client), "run", gloo("skip"), collectives=True)
    found = picture_of(sender, "desync")
    table = parts_of(found, "tables")["calls"]
    number = re.search(r"#(\d+)", found["what"])
    assert number is not None
    here = [row for row in table["rows"] if row[0] == number[1]]
    assert len(here) == 2
    assert here[0][-1] == f"rank {RANK}", "the rarest first"
    assert here[0][1:4] != here[1][1:4]


def test_checkpoints_are_drawn_with_what_they_took_before(sender: Sender) -> None:
    slow = dataclasses.replace(job("slow_save", size=4.0), save_every=20)
    slow = dataclasses.replace(slow, faults=(Fault("slow_save", start=80, size=4.0),))
    send_job(poster(sender.client), "run", slow)
    found = picture_of(sender, "slow_checkpoint")
    charts = parts_of(found, "charts")
    steps = charts["saves"]["x"]
    assert steps == list(range(20, 161, 20))
    took = dict(zip(steps, charts["saves"]["lines"][0]["values"], strict=True))
    assert took[160] > 4 * took[20]
    (before,) = charts["saves"]["limits"]
    assert before["label"] == "before"
    assert took[20] < before["value"] < took[160]
    apart = picture_of(sender, "checkpoint_interval")["picture"]["charts"][1]
    assert [limit["label"] for limit in apart["limits"]] == ["advised", "now"]
    known = [value for value in apart["lines"][0]["values"] if value is not None]
    assert apart["limits"][1]["value"] == pytest.approx(np.median(known), rel=0.1)


def test_stages_stand_beside_each_other(sender: Sender) -> None:
    slow = tuple(Fault("slow_compute", rank=rank, size=0.5) for rank in (4, 5))
    send_job(
        poster(sender.client), "run",
        Job(data=2, pipeline=4, steps=160, microbatches=8, backend="gloo", faults=slow),
    )  # fmt: skip
    found = picture_of(sender, "stage_imbalance")
    (part,) = found["picture"]["bars"]
    assert [bar["label"] for bar in part["bars"]] == [f"stage {stage}" for stage in range(4)]
    assert [bar["is_named"] for bar in part["bars"]] == [False, False, True, False]
    work = [sum(bar["values"][:3]) for bar in part["bars"]]
    assert work[2] == pytest.approx(1.5 * work[0], rel=0.1)
    (even,) = part["limits"]
    assert even["value"] == pytest.approx(np.mean(work), rel=0.01)
    waits = [bar["values"][part["parts"].index("blocked")] for bar in part["bars"]]
    assert waits[2] < min(waits[0], waits[1], waits[3])


def test_a_slower_job_is_drawn_with_what_it_was_and_is(sender: Sender) -> None:
    onset = 300
    everyone = tuple(Fault("slow_compute", rank=r, start=onset, size=0.5) for r in range(4))
    slower = Job(data=4, steps=600, backend="gloo", forward_ms=100.0, seed=2, faults=everyone)
    send_job(poster(sender.client), "run", slower)
    found = picture_of(sender, "slowdown")
    assert found["onset_step"] == pytest.approx(onset, abs=2)
    (chart,) = found["picture"]["charts"]
    limits = {limit["label"]: limit["value"] for limit in chart["limits"]}
    assert set(limits) == {"before", "since"}
    for side, label in zip(sides(chart), ("before", "since"), strict=True):
        assert float(np.median(side)) == pytest.approx(limits[label], rel=0.05)
    assert f"before: {limits['before']:.0f} ms" in chart["text"]


def test_memory_is_drawn_with_the_room_that_there_is(sender: Sender) -> None:
    memory = {"memory_total_bytes": 100 << 30, "memory_available_bytes": 3 << 30}
    host = sampled("host", "node-0001", **memory)
    send_job(poster(sender.client), "run", job("leak", size=40.0))
    sender.send(chunks=[host])
    found = picture_of(sender, "memory_growth")
    (chart,) = found["picture"]["charts"]
    (limit,) = chart["limits"]
    assert limit["label"] == "no room is left"
    newest = [value for value in chart["lines"][0]["values"] if value is not None][-1]
    assert limit["value"] == pytest.approx(newest + (3 << 30), rel=0.01)
    assert "no room is left: " in chart["text"]


def sampled(kind: Any, host: str, **columns: int) -> schema.Chunk:
    """Return one sample of a machine."""
    values: dict[str, Any] = {
        name: np.full(1, -1, np.float32 if name in schema.FLOAT_COLUMNS else np.int64)
        for name in schema.CHUNK_COLUMNS[kind]
    }
    values |= {name: np.array([value]) for name, value in columns.items()}
    values |= {"time_ns": np.array([START_NS]), "interval_ns": np.array([10**9])}
    return schema.Chunk(
        kind=kind, attempt=0, rank=-1, host=host, count=1, time_lo_ns=START_NS,
        time_hi_ns=START_NS, data=encode_chunk(values),
    )  # fmt: skip


def test_what_a_step_consists_of_before_and_since(sender: Sender) -> None:
    send_job(poster(sender.client), "run", gloo("slow_compute", size=0.6))
    number = stored(sender, kind="communication_bound", ranks=[], onset_step=START)
    picture = sender.get(f"/findings/{number}/picture")
    assert [chart["key"] for chart in picture["charts"]] == ["step"]
    (part,) = picture["bars"]
    assert part["title"] == "Where a step goes"
    assert len(part["bars"]) > 1
    for bar in part["bars"]:
        assert len(bar["values"]) == len(part["parts"])
        assert 60 < sum(value for value in bar["values"] if value) < 130


def test_where_the_time_went_adds_up(client: TestClient) -> None:
    run_id = seed_with(poster(client), fault="hang", steps=100, slow_rank=2,
                       start_ns=time.time_ns() - 600 * 10**9)  # fmt: skip
    (part,) = picture_of(Sender(client, run_id), "goodput")["picture"]["bars"]
    shares = {bar["label"]: bar["values"][0] for bar in part["bars"]}
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert next(iter(shares)) == "productive"


def test_where_no_process_is_known_a_gpu_is_that_of_its_local_rank(client: TestClient) -> None:
    run_id = seed_with(poster(client), fault="none", steps=100, gpus=True)
    sender = Sender(client, run_id)
    first = sender.get("/machines")["machines"][0]["first_ms"]
    host = next(one["host"] for one in sender.get("/ranks")["ranks"] if one["rank"] == 1)
    number = stored(sender, kind="power_cap", ranks=[1], hosts=[host], onset_ms=first)
    charts = sender.get(f"/findings/{number}/picture")["charts"]
    assert {line["label"] for chart in charts for line in chart["lines"]} == {f"GPU 1 of {host}"}


def test_of_gpus_of_which_none_is_named_the_busiest_is_drawn(client: TestClient) -> None:
    run_id = seed_with(poster(client), fault="none", steps=100, gpus=True)
    sender = Sender(client, run_id)
    first = sender.get("/machines")["machines"][0]["first_ms"]
    number = stored(sender, kind="gpu_underuse", ranks=[], hosts=[], onset_ms=first)
    (chart,) = sender.get(f"/findings/{number}/picture")["charts"]
    assert chart["key"] == "gpu_utilization"
    assert chart["limits"] == [{"label": "little to do", "value": 0.3}]
    named = [value for value in chart["lines"][0]["values"] if value is not None]
    others = [value for value in chart["median"] if value is not None]
    assert float(np.mean(named)) >= float(np.mean(others))


def test_replicas_that_differ_stand_with_their_sums(sender: Sender) -> None:
    send_job(poster(sender.client), "run", job("replica_drift"))
    found = picture_of(sender, "replica_drift")
    table = parts_of(found, "tables")["checksums"]
    by_step: dict[str, list[str]] = {}
    for step, _, ranks in table["rows"]:
        by_step.setdefault(step, []).append(ranks)
    onset = str(found["onset_step"])
    assert by_step[onset][0] == f"rank {RANK}"
    assert len(by_step[onset]) == 2
    assert len(by_step[str(found["onset_step"] - 20)]) == 1


def registered(ranks: int, host: str = "node-a") -> list[Any]:
    return [
        schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=ranks, local_rank=rank,
            local_world_size=ranks, node_rank=0, host=host, pid=rank + 1,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def numbers_of(ranks: int, steps: int, values: Any) -> list[Any]:
    return [
        schema.Metrics(attempt=0, rank=rank, time_ns=START_NS + step * 10**9, step=step,
                       values=values(rank, step))
        for step in range(1, steps + 1) for rank in range(ranks)
    ]  # fmt: skip


def send(sender: Sender, *records: Any, **more: Any) -> None:
    """Send records of a run of which nothing else is known."""
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=START_NS, name="run"))
    sender.send(*records, **more)


def test_stale_gradients_are_drawn_over_their_bound(sender: Sender) -> None:
    def versions(rank: int, step: int) -> dict[str, float]:
        read = 4 * step
        late = 9 if rank == 1 and step > 40 else 2
        return {"version_read": read, "version_applied": read + late, "staleness_bound": 4}

    send(sender, *registered(4), *numbers_of(4, 100, versions))
    found = picture_of(sender, "staleness")
    (chart,) = found["picture"]["charts"]
    assert (chart["lines"][0]["label"], chart["onset"]) == ("rank 1", 41)
    assert [set(side) for side in sides(chart)] == [{2.0}, {9.0}]
    assert chart["limits"] == [{"label": "the declared bound", "value": 4.0}]
    assert set(chart["high"]) == {2.0}


def test_shards_stand_beside_their_fair_share(sender: Sender) -> None:
    def totals(rank: int, step: int) -> dict[str, float]:
        if rank:
            return {"version_read": step, "version_applied": step}
        return {f"shard_{shard}_requests": (70 if shard == 2 else 10) * step for shard in range(4)}

    send(sender, *registered(4), *numbers_of(4, 40, totals))
    found = picture_of(sender, "hot_shard")
    (part,) = found["picture"]["bars"]
    assert [(bar["label"], bar["is_named"], bar["values"]) for bar in part["bars"]] == [
        (f"shard {shard}", shard == 2, [2800.0 if shard == 2 else 400.0]) for shard in range(4)
    ]
    assert part["limits"] == [{"label": "a fair share", "value": 1000.0}]


def test_what_a_loss_is_divided_by_stands_with_its_ranks(sender: Sender) -> None:
    said = {"passes": "4", "local": "3", "factors": "4 4", "reduction": "mean"}
    scales = [
        schema.Event(attempt=0, rank=rank, time_ns=START_NS, step=2, name="loss scale", fields=said)
        for rank in range(4)
    ]
    losses = numbers_of(4, 40, lambda rank, step: {"loss": 3.0 - step / 100})
    send(sender, *registered(4), *scales, *losses)
    found = picture_of(sender, "accumulation")
    (table,) = found["picture"]["tables"]
    assert table["rows"] == [["4", "3", "4 and 4", "mean", "ranks 0, 1, 2, 3"]]
    assert set(parts_of(found, "charts")) == {"loss"}


def test_passes_stand_with_what_they_began_with(sender: Sender) -> None:
    def begins(rank: int, number: int) -> Any:
        return schema.Event(
            attempt=0, rank=rank, time_ns=START_NS + number, step=4 + 40 * (number - 1),
            name="data pass",
            fields={"loader": "0", "pass": str(number), "batches": "0a 1b 2c", "group": "4 00c0",
                    "sampler": "DistributedSampler", "shuffles": "True", "epoch": "0 of 9"},
        )  # fmt: skip

    losses = numbers_of(4, 100, lambda rank, step: {"loss": 3.0 - step / 100})
    send(sender, *registered(4), *(begins(r, n) for r in range(4) for n in (1, 2)), *losses)
    for kind in ("same_order", "same_samples"):
        (table,) = picture_of(sender, kind)["picture"]["tables"]
        assert [row[0] for row in table["rows"]] == ["1", "2"]
        assert {row[3] for row in table["rows"]} == {"0"}
        assert {row[4] for row in table["rows"]} == {"0a 1b 2c"}
        assert {row[5] for row in table["rows"]} == {"ranks 0, 1, 2, 3"}


def test_an_xid_is_a_mark_at_its_gpu(sender: Sender) -> None:
    error = schema.Event(
        attempt=0, rank=-1, time_ns=START_NS + 5 * 10**9, name="xid",
        fields={"number": "79", "gpu": "3", "host": "node-a", "text": "GPU has fallen off the bus"},
    )  # fmt: skip
    send(sender, *registered(4), error)
    found = picture_of(sender, "xid")
    (part,) = found["picture"]["lanes"]
    ((lane,), onset) = part["lanes"], found["onset_ms"]
    assert (lane["label"], lane["is_named"]) == ("GPU 3 of node-a", True)
    assert [(span["begin_ms"], span["text"]) for span in lane["spans"]] == [
        (onset, "GPU has fallen off the bus")
    ]
    assert "fallen off the bus" in part["text"]


def process_chunk(ranks: int, seconds: int, stopped: Any) -> schema.Chunk:
    rows = [(second, rank) for second in range(seconds) for rank in range(ranks)]
    columns: dict[str, Any] = {
        name: np.full(len(rows), -1, np.int64) for name in schema.CHUNK_COLUMNS["process"]
    }
    columns |= {
        "time_ns": np.array([START_NS + second * 10**9 for second, _ in rows]),
        "interval_ns": np.full(len(rows), 10**9), "rank": np.array([rank for _, rank in rows]),
        "pid": np.array([rank + 1 for _, rank in rows]),
        "stopped_by": np.array([stopped(rank, second) for second, rank in rows]),
    }  # fmt: skip
    return schema.Chunk(
        kind="process", attempt=0, rank=-1, host="node-a", count=len(rows), time_lo_ns=START_NS,
        time_hi_ns=START_NS + (seconds - 1) * 10**9, data=encode_chunk(columns),
    )  # fmt: skip


def test_a_stopped_process_is_seen_stopped(sender: Sender) -> None:
    chunk = process_chunk(4, 60, lambda rank, second: int(rank == 2 and 20 <= second < 35))
    send(sender, *registered(4), chunks=[chunk])
    found = picture_of(sender, "stopped_process")
    (part,) = found["picture"]["lanes"]
    lanes = {lane["label"]: lane["spans"] for lane in part["lanes"]}
    first = START_NS / 1e6
    assert [
        (span["state"], (span["begin_ms"] - first) / 1e3, (span["end_ms"] - first) / 1e3)
        for span in lanes["rank 2"]
    ] == [("ran", 0, 20), ("stopped", 20, 35), ("ran", 35, 59)]
    assert [span["state"] for span in lanes["rank 0"]] == ["ran"]
    assert "stopped for about 15 s" in part["text"]


def test_facts_that_differ_stand_with_their_ranks(client: TestClient) -> None:
    run_id = seed_with(poster(client), fault="slow_compute", steps=100)
    sender = Sender(client, run_id)
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    found = sender.get("/findings")["open"]
    one = next(finding for finding in found if "nccl.version" in finding["what"])
    (table,) = sender.get(f"/findings/{one['id']}/picture")["tables"]
    rows = [row for row in table["rows"] if row[0] == "nccl.version"]
    assert rows == [["nccl.version", "2.21.5", "rank 3"],
                    ["nccl.version", "2.23.4", "ranks 0, 1, 2"]]  # fmt: skip


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Any, database_url: str) -> Settings:
    """Settings with the rules of the test for what is kept."""
    rules: dict[str, Any] = getattr(request, "param", {})
    return Settings(
        data_dir=new_data(tmp_path / "data", database_url), database_url=database_url,
        look_seconds=3600.0, retention_seconds=80_000.0, disk_low_bytes=0, disk_reserve_bytes=0,
        **rules,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{"keep_steps_days": 1.0}], indirect=True)
def test_what_retention_removed_is_said_beside_what_is_left(client: TestClient) -> None:
    sender = Sender(client)
    send_job(poster(client), "run", gloo("garbage", size=0.6))
    found = picture_of(sender, "garbage_collection")
    assert (set(parts_of(found, "charts")), found["picture"]["notes"]) == (
        {"own_work", "gc_ns"}, [],
    )  # fmt: skip
    service = client.app.state.service  # type: ignore[attr-defined]
    for table, name, days in (
        (tables.received_mark, "time_ns", 1), (None, "", 0), (tables.received_mark, "time_ns", 30),
        (tables.run, "received_ns", 30),
    ):  # fmt: skip
        if table is None:
            service.writer.run(mark)
            continue
        earlier = sa.update(table).values({name: table.c[name] - days * 86_400 * 10**9})
        service.writer.run(lambda unit, earlier=earlier: unit.connection.execute(earlier))
    service.retention.round()
    left = sender.get(f"/findings/{found['id']}/picture")
    assert {chart["key"] for chart in left["charts"]} == {"own_work"}
    (note,) = left["notes"]
    assert note.startswith("no single step around its onset is stored: Older single steps were ")
    assert "removed by retention" in note


def test_of_many_ranks_the_band_holds_some_and_says_so(sender: Sender) -> None:
    big = Job(data=64, steps=40, tells_numbers=True, faults=(Fault("nan", rank=9, start=20),))
    send_job(poster(sender.client), "run", big)
    chart = picture_of(sender, "nan")["picture"]["charts"][0]
    assert chart["others"] == f"{MAX_OTHERS} of the 63 other ranks"
