"""Every page of a seeded run, and what a page says when there is little to say."""

from __future__ import annotations

import base64
import csv
import io
import tracemalloc
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.api.findings.schema import Findings
from rankscope_server.api.logs.schema import Logs
from rankscope_server.api.machines.schema import Machines, Samples
from rankscope_server.api.overview.schema import Overview
from rankscope_server.api.ranks.schema import (
    CollectiveRecords,
    Collectives,
    Errors,
    RankDetail,
    Ranks,
)
from rankscope_server.api.runs.schema import EnvironmentAnswer
from rankscope_server.api.steps.queries import before_and_now, typical_range
from rankscope_server.api.steps.schema import BesidePeers, Budget, Map, MetricsAnswer, Throughput
from rankscope_server.findings.text import ms_text
from rankscope_server.text import group_text
from tests.server.conftest import Sender, TestClient, log_line, poster
from tests.server.seed import seed_with

NOW = 1_700_000_000 * 10**9
PAGES = {
    "": Overview,
    "/findings": Findings,
    "/map": Map,
    "/throughput": Throughput,
    "/ranks/0/steps": BesidePeers,
    "/budget": Budget,
    "/ranks": Ranks,
    "/ranks/0": RankDetail,
    "/collectives": Collectives,
    "/collectives/records": CollectiveRecords,
    "/logs": Logs,
    "/errors": Errors,
    "/environment": EnvironmentAnswer,
    "/machines": Machines,
    "/samples": Samples,
    "/metrics": MetricsAnswer,
}


def cells(plane: str, rows: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(plane), np.uint8).reshape(rows, -1)


@pytest.mark.parametrize("path", PAGES)
def test_answers_have_their_documented_shape(seeded: Sender, path: str) -> None:
    answer = msgspec.convert(seeded.get(path), PAGES[path], strict=True)
    assert answer is not None


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_an_etag_and_a_csv_twin(seeded: Sender, path: str) -> None:
    url = f"/api/v1/runs/{seeded.run_id}{path}"
    first = seeded.client.get(url)
    again = seeded.client.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    table = seeded.client.get(url, params={"format": "csv"})
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.reader(io.StringIO(table.text)))
    assert all(len(row) == len(rows[0]) for row in rows)
    assert seeded.client.get(url, params={"format": "xml"}).status_code == 422


@pytest.mark.parametrize("path", PAGES)
def test_unknown_run_is_a_404_that_says_where_to_look(client: TestClient, path: str) -> None:
    reply = client.get(f"/api/v1/runs/nothing{path}")
    assert reply.status_code == 404
    assert reply.json()["error"]["remedy"]


@pytest.mark.parametrize("path", PAGES)
def test_a_run_that_only_began_has_every_page(sender: Sender, path: str) -> None:
    sender.send(
        schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="new", world_size=4),
    )
    if not path.startswith("/ranks/0"):
        msgspec.convert(sender.get(path), PAGES[path], strict=True)


def test_overview(seeded: Sender) -> None:
    page = seeded.get("")
    assert page["run"]["name"] == "demo-run gpt"
    assert page["run"]["hosts"] == ["node-a", "node-b"]
    assert page["run"]["num_nodes"] == 2
    assert page["run"]["step"] == 100
    assert page["coverage"]["text"] == "4 of 4 ranks reporting"
    assert page["counts"]["environment_differences"] == 2
    (attempt,) = page["attempts"]
    assert (attempt["step_lo"], attempt["step_hi"]) == (1, 100)
    assert attempt["exit_text"] == "all ranks ended cleanly"
    numbers = {number["key"]: number for number in page["numbers"]}
    assert 150 < numbers["step_time"]["value"] < 180
    assert 0.15 < numbers["waiting"]["value"] < 0.3
    assert numbers["loss"]["value"] > 0


def test_runs_are_found_by_name_host_and_status(client: TestClient) -> None:
    seed_with(poster(client), steps=20)
    Sender(client, "other").send(log_line("hello"))

    def found(**params: str) -> list[str]:
        answer = client.get("/api/v1/runs", params=params).json()
        assert answer["total"] == len(answer["runs"])
        return [run["run_id"] for run in answer["runs"]]

    assert found() == ["demo-run", "other"]
    assert found(q="gpt") == ["demo-run"]
    assert found(q="node-b train.py") == ["demo-run"]
    assert found(q="100%_") == []
    assert found(status="failed") == []
    page = client.get("/api/v1/runs", params={"limit": 1, "offset": 1}).json()
    assert (page["total"], len(page["runs"])) == (2, 1)


def test_map_shows_the_slow_rank_in_its_steps(seeded: Sender) -> None:
    answer = seeded.get("/map", width=1000)
    assert (answer["bin"], answer["columns"], answer["unit"]) == (1, 100, "ratio")
    levels = cells(answer["cells"], 4).astype(int)
    slow = levels[2, 39:]
    assert (slow > 127 + 127 * np.log2(1.3)).all()
    others = np.delete(levels, 2, axis=0)[:, 1:]
    assert (np.abs(others - 127) < 127 * np.log2(1.15)).all()
    assert (levels[2, 1:39] < 127 + 127 * np.log2(1.15)).all()
    exact = seeded.get("/cell", rank=2, step=60)
    assert exact["ratio"] == pytest.approx(2 ** ((levels[2, 59] - 127) / 127), rel=0.006)
    assert exact["own_work_ms"] == pytest.approx(exact["step_ms"] - exact["blocked_ms"], rel=1e-3)
    assert sum(exact["phases"].values()) == pytest.approx(exact["own_work_ms"], rel=0.01)


@pytest.mark.parametrize("width", [1, 7, 50, 99, 100, 101])
@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_a_bin_of_the_map_holds_its_worst_cell(seeded: Sender, width: int, lanes: int) -> None:
    fine = cells(seeded.get("/map", metric="step", width=4000)["cells"], 4)
    coarse = seeded.get("/map", metric="step", width=width, lanes=lanes)
    rank_bin, size = coarse["rank_bin"], coarse["bin"]
    assert coarse["columns"] <= width
    assert size & (size - 1) == 0
    got = cells(coarse["cells"], len(coarse["rows"])).astype(int)
    scale = coarse["value_hi"] / seeded.get("/map", metric="step", width=4000)["value_hi"]
    for row in range(got.shape[0]):
        for column in range(got.shape[1]):
            ranks = slice(row * rank_bin, (row + 1) * rank_bin)
            block = fine[ranks, column * size : (column + 1) * size]
            assert got[row, column] == pytest.approx(min(block.max() / scale, 254), abs=1.5)
    assert not cells(coarse["missing"], len(coarse["rows"])).any()


def test_missing_cells_are_told_and_never_compete(sender: Sender) -> None:
    seed_with(
        poster(sender.client), run_id="run", steps=40, ranks=4, fault="none", ranks_per_node=4
    )
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="x", world_size=6))
    answer = sender.get("/map", metric="step", width=10, lanes=3)
    missing = cells(answer["missing"], 3)
    assert (missing[2] == 255).all()
    assert (cells(answer["cells"], 3)[2] == 255).all()
    assert not missing[:2].any()
    assert "2 ranks sent no step here" in answer["text"]


def test_throughput_budget_and_their_ranges(seeded: Sender) -> None:
    strip = seeded.get("/throughput", width=10)
    assert strip["bin"] == 16
    assert strip["step"][0] == 1
    assert all(
        lo <= mid <= hi
        for lo, mid, hi in zip(
            strip["step_min_ms"], strip["step_median_ms"], strip["step_max_ms"], strict=True
        )
    )
    part = seeded.get("/throughput", **{"from": 50, "to": 60}, width=100)
    assert part["step"] == list(range(50, 61))
    budget = seeded.get("/budget", last=20)
    assert (budget["step_lo"], budget["step_hi"]) == (81, 100)
    assert budget["rows"]
    for row in budget["rows"]:
        assert list(row["parts"]) == budget["parts"]
        assert sum(row["parts"].values()) == pytest.approx(row["total_ms"], abs=0.01)
    median = budget["rows"][0]["parts"]
    assert 40 < median["waiting"] + median["communication"] < 60
    assert 30 < median["forward"] < 40


def test_pages_of_a_run_that_claims_a_far_rank_stay_small(sender: Sender) -> None:
    for rank in (0, schema.MAX_RANK):
        columns: dict[str, Any] = dict.fromkeys(schema.STEP_COLUMNS, np.zeros(60, np.int64))
        columns["step"] = np.arange(1, 61)
        columns["started_ns"] = NOW + np.arange(60) * 10**8
        columns["duration_ns"] = np.full(60, 10**8)
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="node-a", count=60, time_lo_ns=NOW,
            time_hi_ns=NOW, step_lo=1, step_hi=60, data=encode_chunk(columns),
        )  # fmt: skip
        assert sender.send(chunks=[chunk])["refused"] == []
    for path in ("/map", "/budget"):
        tracemalloc.start()
        sender.get(path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 300 << 20, path  # one plane of so many ranks by 64 steps is 32 MiB
    budget = sender.get("/budget")
    assert (budget["step_lo"], budget["step_hi"]) == (54, 60)  # fewer than asked for, as it says
    assert budget["rows"][0]["total_ms"] == 100


def test_steps_of_a_rank_stand_beside_those_of_its_peers(seeded: Sender) -> None:
    slow = seeded.get("/ranks/2/steps", **{"from": 1, "to": 100})
    assert (slow["num_peers"], slow["bin"], slow["step"]) == (3, 1, list(range(1, 101)))
    of_rank = [seeded.get("/cell", rank=rank, step=60)["own_work_ms"] for rank in range(4)]
    assert slow["value_ms"][59] == pytest.approx(of_rank[2], abs=1e-3)
    others = sorted(of_rank[:2] + of_rank[3:])
    shown = [slow[f"peers_{name}_ms"][59] for name in ("lo", "median", "hi")]
    assert shown == pytest.approx(others, abs=1e-3)
    after = slice(45, 100)
    assert min(slow["value_ms"][after]) > 1.3 * max(slow["peers_median_ms"][after])
    assert slow["text"].startswith("Rank 2 takes ")
    assert "its 3 peers" in slow["text"]
    binned = seeded.get("/ranks/2/steps", **{"from": 1, "to": 100}, width=10)
    assert (binned["bin"], binned["step"][1]) == (16, 17)
    assert binned["worst_ms"][3] == max(slow["value_ms"][48:64])
    assert binned["peers_lo_ms"][3] == min(slow["peers_lo_ms"][48:64])
    newest = seeded.get("/ranks/2/steps")
    assert newest["step"][-1] == 100
    missing = seeded.client.get(f"/api/v1/runs/{seeded.run_id}/ranks/77/steps")
    assert (missing.status_code, missing.json()["error"]["field"]) == (404, "rank")


def test_a_rank_without_peers_stands_alone(sender: Sender) -> None:
    seed_with(
        poster(sender.client), run_id="run", steps=40, ranks=1, fault="none", ranks_per_node=1
    )
    alone = sender.get("/ranks/0/steps")
    assert (alone["num_peers"], set(alone["peers_median_ms"])) == (0, {None})
    assert alone["text"].endswith("no other rank has its role.")


def test_collectives_are_counted_exactly(seeded: Sender) -> None:
    whole = seeded.get("/collectives")
    assert sum(row["count"] for row in whole["rows"]) == 4 * 100 * 3
    part = seeded.get("/collectives", rank=1, **{"from": 11, "to": 20})
    assert sum(row["count"] for row in part["rows"]) == 10 * 3
    assert {(row["num_ranks"], row["group_text"]) for row in whole["rows"]} == {(4, "all 4 ranks")}
    assert whole["text"].endswith("of all 4 ranks.")
    raw = seeded.get("/collectives/records", rank=1, **{"from": 20, "to": 20}, limit=2)
    assert [row["sequence"] for row in raw["rows"]] == [60, 59]
    assert raw["capped"] == {"shown": 2, "total": 3}


@pytest.mark.parametrize(
    ("ranks", "description", "text"),
    [
        (range(8), "default_pg", "all 8 ranks"),
        (range(4, 8), "undefined", "ranks 4 to 7"),
        ([6, 0, 2, 4], "dp", "dp: 4 ranks from 0, 2 apart"),
        ([3], "", "rank 3"),
        ([1, 6], "", "ranks 1, 6"),
        ([0, 1, 3, 6, 7], "odd", "odd: ranks 0, 1, 3, 6 and 1 more"),
        ([], "", "no rank"),
    ],
)
def test_groups_have_names_and_members(ranks: Any, description: str, text: str) -> None:
    assert group_text(list(ranks), 8, description) == text


def test_percentiles_from_the_rollup_are_close(seeded: Sender) -> None:
    raw = seeded.get("/collectives/records", limit=5000)["rows"]
    for row in seeded.get("/collectives")["rows"]:
        durations = [r["duration_ms"] for r in raw if r["size_bytes"] == row["size_bytes"]]
        for key, share in (("p50_ms", 50), ("p99_ms", 99)):
            exact = float(np.percentile(durations, share, method="inverted_cdf"))
            assert exact * 0.999 <= row[key] <= exact * 1.1
        assert row["max_ms"] == pytest.approx(max(durations))


def test_ranks_and_one_rank(seeded: Sender) -> None:
    rows = seeded.get("/ranks")["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert {row["state"] for row in rows} == {"ended"}
    one = seeded.get("/ranks/3")
    assert one["host"] == "node-b"
    assert one["groups"][0]["issued"] == 300
    assert one["collectives"][0]["step"] == 100
    assert seeded.client.get(f"/api/v1/runs/{seeded.run_id}/ranks/9").status_code == 404


def test_environment_tells_what_differs(seeded: Sender) -> None:
    answer = seeded.get("/environment")
    by_fact = {item["fact"]: item for item in answer["differences"]}
    assert by_fact["nccl.version"]["severity"] == "critical"
    assert by_fact["nccl.version"]["values"][0] == {"value": "2.21.5", "ranks": [3]}
    assert by_fact["hostname"]["severity"] == "info"
    assert "nccl.version is 2.21.5 on rank 3" in answer["text"]


@pytest.mark.core
def test_errors_name_the_first_and_fold_the_echoes(sender: Sender) -> None:
    sender.run_id = seed_with(poster(sender.client), steps=60, fault="crash", slow_rank=1)
    groups = sender.get("/errors")["groups"]
    assert [(group["role"], group["ranks"]) for group in groups] == [
        ("initiating", [1]),
        ("cascade", [0, 2, 3]),
    ]
    states = {row["rank"]: row["state"] for row in sender.get("/ranks")["ranks"]}
    assert set(states.values()) == {"failed"}
    assert sender.get("")["attempts"][0]["exit_text"].startswith("rank 1: exception: ValueError")


def test_metrics(seeded: Sender) -> None:
    loss = next(item for item in seeded.get("/metrics")["series"] if item["name"] == "loss")
    assert loss["step"] == list(range(1, 101))
    one = seeded.get("/metrics", rank=0, names="loss")["series"]
    assert [item["rank"] for item in one] == [0]


def test_metrics_merged_over_ranks(sender: Sender) -> None:
    for rank, values in enumerate(([1.0, 5.0], [3.0, float("nan")])):
        for step, value in enumerate(values, 1):
            sender.send(
                {"kind": "metrics", "attempt": 0, "rank": rank, "time_ns": step, "step": step,
                 "values": {"loss": value}}
            )  # fmt: skip
    (loss,) = sender.get("/metrics", merged=True)["series"]
    assert (loss["rank"], loss["step"]) == (-1, [1, 2])
    assert (loss["value"], loss["min"], loss["max"]) == ([2.0, 5.0], [1.0, 5.0], [3.0, 5.0])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_steps_that_a_restart_repeated_the_numbers_that_were_kept_are_shown(
    sender: Sender, order: tuple[int, int], merged: bool
) -> None:
    told = ({1: 1.0, 2: 2.0, 3: 9.0}, {3: 3.0, 4: 4.0})  # by attempt
    for attempt in order:
        sender.send(
            *(
                schema.Metrics(
                    attempt=attempt, rank=0, time_ns=NOW + step, step=step, values={"loss": value}
                )
                for step, value in told[attempt].items()
            )
        )
    (loss,) = sender.get("/metrics", merged=merged)["series"]
    assert (loss["step"], loss["value"]) == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])


def test_a_cell_of_a_spreadsheet_cannot_be_a_formula(sender: Sender) -> None:
    for text in ("=1+1", "+cmd", "-2", "@x", "\tx", "safe"):
        sender.send(log_line(text))
    text = sender.client.get("/api/v1/runs/run/logs", params={"format": "csv"}).text
    messages = [row["message"] for row in csv.DictReader(io.StringIO(text))]
    assert sorted(messages) == sorted(["'=1+1", "'+cmd", "'-2", "'@x", "'\tx", "safe"])


@pytest.mark.parametrize(
    ("path", "params", "field"),
    [
        ("/map", {"metric": "mood"}, "metric"),
        ("/map", {"width": 0}, "width"),
        ("/map", {"from": "x"}, "from"),
        ("/map", {"from": 9, "to": 3}, "from"),
        ("/map", {"from": 1 << 70}, "from"),
        ("/cell", {"rank": 99, "step": 1}, "rank"),
        ("/logs", {"level": "LOUD"}, "level"),
        ("/logs", {"rank": "a-b"}, "rank"),
        ("/logs", {"cursor": "zzz"}, "cursor"),
        ("/logs", {"from_ms": "nan"}, "from_ms"),
        ("/findings/99", {}, "id"),
    ],
)
def test_bad_parameters_name_their_field(
    seeded: Sender, path: str, params: dict[str, Any], field: str
) -> None:
    reply = seeded.client.get(f"/api/v1/runs/{seeded.run_id}{path}", params=params)
    assert reply.status_code == (404 if path in ("/cell", "/findings/99") else 422)
    assert reply.json()["error"]["field"] == field


EXTREMES = (
    "-1",
    "0",
    "1",
    "99999999999999999999999",
    "1e999",
    "nan",
    "",
    "\x00",
    "'",
    "\udcff",
    "a,b",
)


@pytest.mark.parametrize("path", [*PAGES, "/cell", "/findings/{}", "/ranks/{}"])
def test_no_parameter_fails_the_server(seeded: Sender, path: str) -> None:
    document = seeded.client.get("/api/v1/openapi.json").json()["paths"]
    known = f"/api/v1/runs/{{run}}{path}".replace("/ranks/0", "/ranks/{rank}")
    known = known.replace("/findings/{}", "/findings/{id}").replace("/ranks/{}", "/ranks/{rank}")
    names = [item["name"] for item in document[known]["get"].get("parameters", [])]
    for value in EXTREMES:
        sent = value.encode("utf-8", "surrogateescape").decode("latin-1")
        for name in names:
            url = f"/api/v1/runs/{seeded.run_id}{path.replace('{}', quote(sent) or 'x')}"
            params = {"rank": "0", "step": "1"} if path == "/cell" else {}
            reply = seeded.client.get(url, params=params | {name: sent})
            assert reply.status_code < 500, (url, name, value)
    is_incomplete = path in ("/cell", "/findings/{}", "/ranks/{}")  # refused before it is looked up
    reply = seeded.client.get(f"/api/v1/runs/%00{path}")
    assert reply.status_code == (422 if is_incomplete else 404)
    assert seeded.client.get("/api/v1/runs", params={"offset": 1 << 70}).status_code == 422


def steps_of(durations_ms: list[float]) -> schema.Chunk:
    """Return the steps of rank 0, one behind the other."""
    took = np.array([int(ms * 1e6) for ms in durations_ms])
    columns: dict[str, Any] = dict.fromkeys(schema.STEP_COLUMNS, np.zeros(len(took), np.int64))
    columns |= {
        "step": np.arange(1, len(took) + 1), "duration_ns": took, "forward_ns": took,
        "started_ns": NOW + np.cumsum(took) - took,
    }  # fmt: skip
    return schema.Chunk(
        kind="steps", attempt=0, rank=0, host="node-a", count=len(took), time_lo_ns=NOW,
        time_hi_ns=NOW + int(took.sum()), data=encode_chunk(columns), step_lo=1, step_hi=len(took),
    )  # fmt: skip


def test_warm_up_is_in_no_number_and_said(sender: Sender) -> None:
    durations = [20_000.0, 100.0, 50.0, 50.0, 50.0] + [40.0] * 25
    sender.send(chunks=[steps_of(durations)])
    numbers = {number["key"]: number for number in sender.get("")["numbers"]}
    assert numbers["step_time"]["value"] == pytest.approx(40)
    assert numbers["throughput"]["value"] == pytest.approx(25)
    assert numbers["throughput"]["reference_text"] == "last 25 steps"
    said = "without the warm-up: first 5 steps, 20.2 s"
    assert numbers["step_time"]["reference_text"] == said
    page = sender.get("/map", metric="step", width=400)
    assert page["text"] == ("Rank 0 has the longest after the warm-up, from step 6: 40 ms.")
    budget = sender.get("/budget")
    assert budget["text"].startswith("A step takes 40.0 ms; most of it")
    assert (budget["step_lo"], budget["step_hi"]) == (6, 30)


def test_no_healthy_step_softens_the_numbers_of_what_is_wrong(sender: Sender) -> None:
    sender.send(chunks=[steps_of([40.0] * 100 + [4000.0] * 15)])
    with sender.client.app.state.service.read() as connection:  # type: ignore[attr-defined]
        assert typical_range(connection, "run", 115, 50, 101) == (101, 115)
        assert typical_range(connection, "run", 115, 50, None) == (66, 115)
        assert before_and_now(connection, "run", 115, 101) == (
            pytest.approx(40), pytest.approx(4000)
        )  # fmt: skip


@pytest.mark.parametrize(
    ("durations", "typical", "first", "warm_up"),
    [
        ([20_000.0], 20_000.0, 1, ""),
        ([20_000.0, 50.0], 50.0, 2, "without the warm-up: first step, 20.0 s"),
        ([20_000.0, 100.0, 50.0], 75.0, 2, "without the warm-up: first step, 20.0 s"),
        ([20_000.0, 100.0] + [50.0] * 5, 50.0, 4, "without the warm-up: first 3 steps, 20.1 s"),
    ],
)
def test_all_numbers_of_a_short_run_are_of_the_same_steps(
    sender: Sender, durations: list[float], typical: float, first: int, warm_up: str
) -> None:
    sender.send(chunks=[steps_of(durations)])
    numbers = {number["key"]: number for number in sender.get("")["numbers"]}
    assert numbers["step_time"]["value"] == pytest.approx(typical)
    assert numbers["step_time"]["reference_text"] == warm_up
    mean = np.mean(durations[first - 1 : -1] or durations[-1:])
    assert numbers["throughput"]["value"] == pytest.approx(1e3 / mean, rel=0.01)
    budget = sender.get("/budget")
    assert (budget["step_lo"], budget["step_hi"]) == (first, len(durations))
    assert budget["text"].startswith(f"A step takes {ms_text(typical)}")
    assert sender.get("/throughput")["now_ms"] == pytest.approx(typical)


def test_a_run_without_a_step_has_no_last_steps(sender: Sender) -> None:
    sender.send(log_line("hello"))
    numbers = {number["key"]: number for number in sender.get("")["numbers"]}
    assert [numbers[key]["reference_text"] for key in ("waiting", "throughput")] == ["", ""]


def test_a_mean_that_is_no_typical_step_is_said_beside_it(sender: Sender) -> None:
    sender.send(chunks=[steps_of(([40.0] * 9 + [600.0]) * 10)])
    number = next(one for one in sender.get("")["numbers"] if one["key"] == "step_time")
    assert number["value"] == pytest.approx(40)
    assert sender.get("/budget")["text"].startswith("A step takes 40.0 ms, 96.0 ms on average;")


def test_a_fact_that_a_rank_could_not_read_is_no_difference(sender: Sender) -> None:
    """Git was slow on one rank, another has no such file: neither says that the code differs."""
    facts = [
        {"code.dirty": "no", "code.commit": "abc", "env.A": "1", "torch.version": "2.13"},
        {"code.dirty": "unknown", "env.A": "", "torch.version": "2.13"},
        {"code.dirty": "no", "code.commit": "abc", "env.A": "1", "torch.version": "2.12"},
    ]
    for rank, known in enumerate(facts):
        sender.send({"kind": "environment", "attempt": 0, "rank": rank, "time_ns": 1,
                     "facts": known})  # fmt: skip
    answer = sender.get("/environment")
    assert [one["fact"] for one in answer["not_known"]] == ["code.commit", "code.dirty"]
    assert {one["fact"] for one in answer["differences"]} == {"env.A", "torch.version"}
    values = {one["value"]: one["ranks"] for one in answer["not_known"][1]["values"]}
    assert values == {"no": [0, 2], "unknown": [1]}
