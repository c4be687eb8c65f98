"""What findings look like, from what is stored: the fault is seen in the picture, and gaps are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.api.pictures.queries import PICTURES
from rankscope_server.api.pictures.subject import MAX_OTHERS
from rankscope_server.findings.kinds import KINDS
from rankscope_server.store import tables
from tests.server.conftest import DATABASES, Sender, poster
from tests.server.jobs_sent import send_job
from tests.simulator.connections import LOSSY, ONSET_S, SLOW, START_S, Net, everybody
from tests.simulator.job import Fault, Job, Noise

RANK, START = 5, 60
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
            "run_id": "run", "attempt": 0, "key": whole["key"], "state": "open", "opened_ns": 1,
            "updated_ns": 1, "body": msgspec.json.encode(whole).decode(),
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
    for kind, (reason, _) in PICTURES.items():
        number = stored(sender, kind=kind, key=f"0/x/{kind}", ranks=[0], hosts=["node-a"])
        assert sender.get(f"/findings/{number}/picture") == {"charts": [], "reason": reason}
    number = stored(sender, kind="goodput", key="0/x/goodput")
    assert sender.get(f"/findings/{number}/picture") == {"charts": [], "reason": ""}
    missing = sender.client.get("/api/v1/runs/run/findings/99999/picture")
    assert missing.status_code == 404


def test_every_picture_is_of_a_kind_that_there_is_and_may_lack(database_url: str) -> None:
    assert set(PICTURES) <= {known.id for known in KINDS}
    assert all(reason and makers for reason, makers in PICTURES.values())


def test_of_many_ranks_the_band_holds_some_and_says_so(sender: Sender) -> None:
    big = Job(data=64, steps=40, tells_numbers=True, faults=(Fault("nan", rank=9, start=20),))
    send_job(poster(sender.client), "run", big)
    chart = picture_of(sender, "nan")["picture"]["charts"][0]
    assert chart["others"] == f"{MAX_OTHERS} of the 63 other ranks"
