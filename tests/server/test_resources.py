"""Resources of all ranks: bands and lines against plain loops, and what was planted is named."""

from __future__ import annotations

import csv
import io
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.api.resources.grid import Grid, deviations_of, on_grid
from tests.server.conftest import DATABASES, Sender, TestClient, serving, url_of
from tests.server.seed import Plan, chunk, sample_columns

S = 10**9
NOW = 1_790_000_000 * S
RANKS, PER_NODE, SECONDS = 16, 8, 60
HUNGRY, IDLE_GPU, SILENT, SPIKE, ENDED = 5, 2, 11, 9, 3  # IDLE_GPU on the second node
GIB = 1 << 30


# --- the grid ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_slices_hold_the_least_the_last_and_the_largest(seed: int) -> None:
    chance = random.Random(seed)
    grid = Grid(NOW, 3 * S, 20)
    series = []
    for _ in range(5):
        count = chance.randrange(1, 40)
        drawn = sorted(NOW + chance.randrange(-5 * S, 70 * S) for _ in range(count))
        numbers = [chance.choice([chance.random(), math.nan]) for _ in drawn]
        series.append((np.array(drawn, np.int64), np.array(numbers)))
    lines = on_grid(grid, series)
    for row, (times, values) in enumerate(series):
        known = [
            (int((at - NOW) // (3 * S)), at, value)
            for at, value in zip(times.tolist(), values.tolist(), strict=True)
            if NOW <= at < NOW + 60 * S and not math.isnan(value)
        ]
        pauses = [b[1] - a[1] for a, b in itertools.pairwise(known)]
        most = int(2.5 * float(np.median(pauses)) / (3 * S)) if pauses else 0
        for place in range(20):
            inside = [value for at, _, value in known if at == place]
            if inside:
                expected = (min(inside), inside[-1], max(inside))
            else:
                before = [(at, value) for at, _, value in known if at < place]
                is_held = bool(before) and place - before[-1][0] <= most
                expected = (before[-1][1] if is_held else math.nan,) * 3
            found = (lines.low[row, place], lines.last[row, place], lines.high[row, place])
            assert found == pytest.approx(expected, nan_ok=True), (row, place)


def lines_of(values: np.ndarray[Any, Any]) -> Any:
    times = NOW + np.arange(values.shape[1], dtype=np.int64) * S
    return on_grid(Grid(NOW, S, values.shape[1]), [(times, row) for row in values])


@pytest.mark.parametrize(("worst", "factor"), [("high", 1.5), ("low", 0.5), ("apart", 1.5)])
def test_a_line_that_is_off_all_the_time_stands_apart_and_noise_does_not(
    worst: str, factor: float
) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(100, 5, (1_024, 60))
    quiet = deviations_of(lines_of(values), worst)
    assert not quiet.apart.any()
    values[17] *= factor
    deviations = deviations_of(lines_of(values), worst)
    assert np.flatnonzero(deviations.apart).tolist() == [17]
    assert int(np.argmax(deviations.scores)) == 17
    good = {"high": "low", "low": "high", "apart": "apart"}[worst]
    other = deviations_of(lines_of(values), good)
    assert other.apart[17] == (worst == "apart"), "on the good side it is nothing"


def test_one_slice_far_off_is_worth_a_line_and_three_are_nobody_s_peers() -> None:
    values = np.random.default_rng(4).normal(100, 5, (64, 60))
    values[9, 30] = 900
    deviations = deviations_of(lines_of(values), "high")
    assert int(np.argmax(deviations.scores)) == 9
    assert not deviations.apart[9]
    few = deviations_of(lines_of(np.array([[1.0, 1.0], [1.0, 1.0], [9.0, 9.0]])), "high")
    assert not few.apart.any()


# --- the answer -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DATABASES)
def client(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("resources"), url_of(request)) as client:
        send_job(client, "job")
        yield client


def host_of(rank: int) -> str:
    return f"node-{'ab'[rank // PER_NODE]}"


def send_job(client: TestClient, run: str) -> None:
    """Two nodes: a rank with much memory, a GPU that idles, a rank that sends nothing, a spike."""
    sender = Sender(client, run, f"p-{run}")
    plan = Plan(run_id=run, ranks=RANKS, ranks_per_node=PER_NODE)
    at: Any = NOW + np.arange(SECONDS, dtype=np.int64) * S
    sender.send(
        schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name=run, world_size=RANKS),
        *(
            schema.RankRegistered(
                attempt=0, rank=rank, time_ns=NOW, world_size=RANKS, local_rank=rank % PER_NODE,
                local_world_size=PER_NODE, node_rank=rank // PER_NODE, host=host_of(rank),
                pid=100 + rank,
            )
            for rank in range(RANKS)
        ),
    )  # fmt: skip
    chunks = []
    for node in range(2):
        host, ranks = host_of(node * PER_NODE), range(node * PER_NODE, (node + 1) * PER_NODE)
        known = np.array([rank for rank in ranks if rank != SILENT])
        times: Any = np.repeat(at, len(known))
        rank = np.tile(known, SECONDS)
        seconds = (times - NOW) // S
        memory = np.where(rank == HUNGRY, 6, 4) * GIB + rank * (1 << 20)
        memory = np.where((rank == SPIKE) & (seconds == 30), 30 * GIB, memory)
        memory = np.where((rank == ENDED) & (seconds > 50), 0, memory)
        process: dict[str, Any] = {
            "rank": rank, "pid": 100 + rank, "rss_bytes": memory,
            "user_us_total": seconds * 900_000, "system_us_total": seconds * 100_000,
        }  # fmt: skip
        gpu = np.tile(np.arange(PER_NODE), SECONDS)
        of_gpus: Any = np.repeat(at, PER_NODE)
        share = np.where((gpu == IDLE_GPU) & (node == 1), 0.4, 0.9)
        gpus: dict[str, Any] = {
            "gpu": gpu,
            "utilization_ratio": share,
            "memory_used_bytes": 60 * GIB,
        }
        for kind, when, told in (
            ("process", times, process), ("gpu", of_gpus, gpus),
            ("host", at, {"memory_used_bytes": (10 + node) * GIB}),
        ):  # fmt: skip
            columns = sample_columns(kind, when, told)
            chunks.append(chunk(plan, kind, schema.NODE_RANK, columns, "time_ns", host))
    sender.send(chunks=chunks)
    numbers = []
    for second in range(0, SECONDS, 2):
        for one in range(RANKS):
            logged = {"tokens_per_second": 1_000.0 + one, "quality": 0.5}
            if one == 0:
                logged["logged_loss"] = 4.0 - second / 100
            numbers.append(
                schema.Metrics(
                    attempt=0, rank=one, time_ns=NOW + second * S, step=second // 2 + 1,
                    values=logged,
                )
            )  # fmt: skip
    sender.send(*numbers)


def ask(client: TestClient, run: str = "job", **asked: Any) -> dict[str, Any]:
    reply = client.get(f"/api/v1/runs/{run}/resources", params=asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def charts(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {chart["key"]: chart for chart in answer["charts"]}


def test_every_chart_is_on_one_grid_and_says_whose_it_is(client: TestClient) -> None:
    answer = ask(client)
    found = charts(answer)
    assert set(found) == {
        "gpu_memory", "rank_memory", "node_memory", "gpu_utilization", "rank_processors",
        "logged_loss", "job_tokens", "tokens_per_second", "own/quality",
    }  # fmt: skip
    assert len(answer["time_ms"]) == SECONDS
    assert answer["bin_ms"] == 1_000
    assert answer["time_ms"][0] == NOW / 1e6
    assert answer["step"][:3] == [1, 1, 2]
    assert answer["step"][-1] == SECONDS // 2
    for chart in found.values():
        for name in ("low", "median", "high"):
            assert len(chart[name]) == SECONDS
        assert all(len(line["values"]) == SECONDS for line in chart["pinned"])
    assert found["rank_memory"]["scope_text"] == "of each rank; known of 15 of 16"
    assert found["gpu_memory"]["scope_text"] == "of each GPU: 16 GPUs"
    assert found["node_memory"]["scope_text"] == "of each node: 2 nodes"
    assert found["logged_loss"]["scope_text"] == "of rank 0 alone"
    assert found["job_tokens"]["scope_text"] == "of the job: sum over 16 ranks"
    assert found["own/quality"]["source_text"] == "what the script gives to rankscope.log_metrics"
    assert "GPU power" in answer["missing"]
    assert "GPU memory in use" not in answer["missing"]


def test_what_is_planted_is_named_with_its_numbers(client: TestClient) -> None:
    answer = ask(client)
    found = charts(answer)
    memory = found["rank_memory"]
    assert memory["usual"] == pytest.approx(4 * GIB, rel=0.01)
    hungry, spike = memory["pinned"][:2]
    assert (hungry["label"], hungry["why"], hungry["stands_apart"]) == ("rank 5", "worst", True)
    assert hungry["value"] == pytest.approx(6 * GIB, rel=0.01)
    assert (spike["rank"], spike["stands_apart"]) == (SPIKE, False)
    assert spike["value"] == pytest.approx(30 * GIB, rel=1e-5), "by that slice it is furthest"
    assert memory["high"][30] == pytest.approx(30 * GIB, rel=1e-5), "one sample of one rank shows"
    assert memory["high"][29] == pytest.approx(6 * GIB, rel=0.01)
    assert min(v for v in memory["low"] if v is not None) > 3 * GIB, (
        "an ended process has no memory"
    )
    gpu = found["gpu_utilization"]["pinned"][0]
    assert (gpu["label"], gpu["stands_apart"], gpu["rank"]) == ("GPU 2 on node-b", True, None)
    assert found["gpu_utilization"]["low"][10] == 0.4
    assert found["gpu_memory"]["pinned"] == [], "all alike"
    assert answer["text"] == (
        "GPU 2 on node-b is an outlier in GPU utilisation: 40 %, its 15 peers 90 %; 1 other outlier"
    )
    assert [c["key"] for c in answer["charts"] if any(p["stands_apart"] for p in c["pinned"])] == [
        "rank_memory", "gpu_utilization",
    ]  # fmt: skip


def test_counters_are_rates_and_the_job_is_a_sum(client: TestClient) -> None:
    found = charts(ask(client))
    assert found["rank_processors"]["median"][0] is None, "a rate needs two"
    assert found["rank_processors"]["median"][5] == pytest.approx(1.0)
    assert found["job_tokens"]["median"][10] == sum(1_000 + rank for rank in range(RANKS))
    assert found["job_tokens"]["low"] == [None] * SECONDS
    assert found["tokens_per_second"]["low"][10] == 1_000


def test_a_rate_that_the_script_gives_of_the_job_is_drawn_in_place_of_the_sum(
    client: TestClient,
) -> None:
    sender = Sender(client, "shared", "node-a")
    for second, one in itertools.product(range(9), range(4)):
        values = {"tokens_per_second": 100.0} | (
            {"job_tokens_per_second": 90.0} if one == 3 else {}
        )
        sender.send(
            schema.Metrics(
                attempt=0, rank=one, time_ns=NOW + second * S, step=second + 1, values=values
            )
        )
    found = charts(ask(client, "shared"))
    assert set(found) == {"job_tokens_given", "tokens_per_second"}
    given = found["job_tokens_given"]
    assert (given["title"], given["median"][4]) == ("Tokens/s of the job", 90.0)
    assert given["scope_text"] == "of the job, as rank 3 reports it"


def test_ranks_are_pinned_and_time_is_chosen(client: TestClient) -> None:
    begin, end = NOW / 1e6 + 20_000, NOW / 1e6 + 29_000
    answer = ask(client, ranks="12,3", from_ms=begin, to_ms=end, width=5)
    assert answer["time_ms"][0] == begin
    assert len(answer["time_ms"]) <= 5
    found = charts(answer)
    asked = [one for one in found["rank_memory"]["pinned"] if one["why"] == "asked for"]
    assert [one["rank"] for one in asked] == [12, 3]
    nodes = [one["label"] for one in found["node_memory"]["pinned"] if one["why"] == "asked for"]
    assert nodes == ["node-b", "node-a"], "and their nodes"
    assert max(v for v in found["rank_memory"]["high"] if v is not None) < 7 * GIB, "no spike here"
    reply = client.get("/api/v1/runs/job/resources", params={"ranks": "x"})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "ranks")


def test_the_table_is_there_as_csv(client: TestClient) -> None:
    reply = client.get("/api/v1/runs/job/resources", params={"format": "csv"})
    rows = {row["key"]: row for row in csv.DictReader(io.StringIO(reply.text))}
    assert rows["rank_memory"]["num"] == "15"
    assert rows["rank_memory"]["worst"].startswith("rank 5, rank 9")


def test_only_what_was_compared_is_called_no_outlier(client: TestClient) -> None:
    sender = Sender(client, "alike", "p-alike")
    start = schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="alike", world_size=4)
    losses = [
        schema.Metrics(
            attempt=0, rank=rank, time_ns=NOW + step * S, step=step, values={"loss": 2.0}
        )
        for rank in range(4) for step in range(1, 20)
    ]  # fmt: skip
    sender.send(start, *losses)
    answer = ask(client, "alike")
    assert answer["text"] == "No rank is an outlier among its peers in the time shown"


def test_nothing_sent_says_so(client: TestClient) -> None:
    sender = Sender(client, "bare", "p-bare")
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="bare", world_size=4))
    answer = ask(client, "bare")
    assert answer["text"] == "Nothing was sampled or logged in the time shown"
    assert answer["charts"] == answer["time_ms"] == []
    assert "GPU utilisation" in answer["missing"]
