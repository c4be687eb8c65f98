"""The orders of the map: every rank in one lane, the odd ones first, groups never mixed."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.api.steps.cells import Plane, deviations
from rankscope_server.api.steps.lanes import MAX_RANKS_SHOWN, Ranks, choose_lanes, rows_of
from rankscope_server.problems import Problem
from tests.server.conftest import Sender, TestClient, poster, serving
from tests.server.jobs_sent import send_job
from tests.server.runs_sent import steps
from tests.server.seed import seed_with
from tests.simulator.job import Job

ORDERS = ("rank", "worst", "node", "stage")
SLOW = 643
Array = np.ndarray[Any, np.dtype[Any]]


def ranks_of(answer: dict[str, Any]) -> list[int]:
    return [rank for row in answer["rows"] for rank in row["ranks"]]


def plane(answer: dict[str, Any], name: str = "cells") -> Array:
    found = np.frombuffer(base64.b64decode(answer[name]), np.uint8)
    return found.reshape(len(answer["rows"]), -1)


def known(lost: list[float], hosts: list[str] | None = None, stages: Any = None) -> Ranks:
    size = len(lost)
    return Ranks(hosts or ["node-a"] * size, stages or [-1] * size, np.array(lost))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lanes", [1, 3, 4])
@pytest.mark.parametrize("metric", ["own_work", "step", "blocked"])
def test_every_rank_is_in_one_lane(seeded: Sender, order: str, lanes: int, metric: str) -> None:
    answer = seeded.get("/map", order=order, lanes=lanes, metric=metric)
    assert answer["order"] == order
    assert sorted(ranks_of(answer)) == [0, 1, 2, 3]
    assert len(plane(answer)) == len(answer["rows"])
    assert all(row["worst_rank"] in row["ranks"] for row in answer["rows"])
    assert max(len(row["ranks"]) for row in answer["rows"]) == answer["rank_bin"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("metric", ["own_work", "step"])
def test_an_order_moves_lanes_and_changes_no_cell(seeded: Sender, order: str, metric: str) -> None:
    plain = seeded.get("/map", metric=metric)
    other = seeded.get("/map", metric=metric, order=order)
    moved = ranks_of(other)
    for name in ("cells", "missing"):
        assert (plane(other, name) == plane(plain, name)[moved]).all()
    for name in ("usual", "value_hi", "pinned", "text", "marks"):
        assert other[name] == plain[name]


def test_the_slow_rank_comes_first_and_a_lane_names_its_worst(seeded: Sender) -> None:
    assert ranks_of(seeded.get("/map", order="worst"))[0] == 2
    (only,) = seeded.get("/map", lanes=1)["rows"]
    assert (only["worst_rank"], only["ranks"]) == (2, [0, 1, 2, 3])


def test_lanes_by_node_never_mix_hosts(seeded: Sender) -> None:
    answer = seeded.get("/map", order="node", lanes=1)
    rows = [(row["group"], row["host"], row["ranks"]) for row in answer["rows"]]
    assert rows == [("node-a", "node-a", [0, 1]), ("node-b", "node-b", [2, 3])]


def test_one_slow_rank_of_a_thousand_is_the_first_lane(client: TestClient) -> None:
    run = seed_with(
        poster(client), ranks=1024, ranks_per_node=64, steps=40, slow_rank=SLOW, slow_from=20,
        steps_per_batch=40,
    )  # fmt: skip
    sender = Sender(client, run)
    answer = sender.get("/map", order="worst", lanes=26)
    first = answer["rows"][0]
    assert (first["ranks"], first["label"], first["host"]) == ([SLOW], f"Rank {SLOW}", "node-k")
    levels = plane(answer).astype(int)
    assert (levels[0, 20:] > 127 + 127 * np.log2(1.3)).all()
    assert levels[1:, 6:].max() < 127 + 127 * np.log2(1.3)
    assert len(answer["rows"]) <= 26
    assert Counter(ranks_of(answer)) == Counter(range(1024))
    by_node = sender.get("/map", order="node", lanes=26)
    assert Counter(ranks_of(by_node)) == Counter(range(1024))
    for row in by_node["rows"]:
        assert {rank // 64 for rank in row["ranks"]} == {ord(row["group"][-1]) - ord("a")}
    (lane,) = [row for row in by_node["rows"] if SLOW in row["ranks"]]
    assert lane["worst_rank"] == SLOW


@pytest.mark.parametrize("is_ratio", [True, False])
def test_one_very_slow_step_counts_more_than_noise(is_ratio: bool) -> None:
    worst = np.random.default_rng(3).normal(1.03, 0.01, (256, 600)).astype(np.float32)
    worst[17, 444] = 1.5
    worst[9] = np.nan
    worst[30, :5] = 9.0  # of the warm-up
    plane = Plane(worst, np.isfinite(worst).astype(np.int32), np.zeros(600, np.int64), set())
    found = deviations(plane, 5, is_ratio=is_ratio)
    assert np.nanargmax(found) == 17
    assert np.flatnonzero(np.isnan(found)).tolist() == [9]
    assert np.nanargmax(deviations(plane, 0, is_ratio=is_ratio)) == 30


def test_ranks_without_data_come_last_and_share_no_lane_with_others() -> None:
    lost = [0.1, np.nan, 0.3, 0.2, np.nan, 0.0]
    rows = rows_of(choose_lanes("worst", known(lost), 3), known(lost))
    assert [(row.ranks, row.group, row.worst_rank) for row in rows] == [
        ([2], "", 2), ([3, 0, 5], "", 3), ([1, 4], "no data", None)
    ]  # fmt: skip
    nothing = known([np.nan] * 3)
    assert [row.ranks for row in rows_of(choose_lanes("worst", nothing, 9), nothing)] == [
        [0], [1], [2]
    ]  # fmt: skip


def test_stages_are_groups_in_their_order() -> None:
    ranks = known([0.0] * 6, stages=[1, 0, -1, 1, 10, 2])
    rows = rows_of(choose_lanes("stage", ranks, 9), ranks)
    assert [(row.group, row.ranks) for row in rows] == [
        ("Stage 0", [1]), ("Stage 1", [0]), ("Stage 1", [3]), ("Stage 2", [5]), ("Stage 10", [4]),
        ("no stage", [2]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """48 ranks of 4 by 3 by 4: tensor innermost, then data, then pipeline stages; 4 on a node."""
    with serving(tmp_path_factory.mktemp("mesh"), "") as client:
        send_job(poster(client), "mesh", MESH)
        yield Sender(client, "mesh")


MESH = Job(data=3, tensor=4, pipeline=4, steps=12, ranks_per_host=4, backend="gloo")
KEYS = ["node", "stage", "group:data", "group:tensor", "group:pipeline"]


@pytest.mark.parametrize(("kind", "prefix"), [("data", "dp"), ("tensor", "tp"), ("pipeline", "pp")])
@pytest.mark.parametrize("lanes", [1, 48])
def test_members_of_a_group_stand_together(
    mesh: Sender, kind: str, prefix: str, lanes: int
) -> None:
    answer = mesh.get("/map", order=f"group:{kind}", lanes=lanes)
    groups = {name: set(ranks) for name, ranks in MESH.groups.items() if name.startswith(prefix)}
    together: dict[str, list[int]] = {}
    for row in answer["rows"]:
        together.setdefault(row["group"], []).extend(row["ranks"])
    assert sorted(map(sorted, together.values())) == sorted(map(sorted, groups.values()))
    assert [rank for ranks in together.values() for rank in ranks] == ranks_of(answer)
    plain = mesh.get("/map", lanes=48)
    if lanes == 48:
        assert (plane(answer) == plane(plain)[ranks_of(answer)]).all()


@pytest.mark.parametrize("order", ["rank", "worst", "group:data"])
@pytest.mark.parametrize("lanes", [7, 48])
def test_bands_name_the_group_of_a_lane_only_where_all_its_ranks_are_of_it(
    mesh: Sender, order: str, lanes: int
) -> None:
    answer = mesh.get("/map", order=order, lanes=lanes)
    bands = {band["key"]: band for band in answer["bands"]}
    assert sorted(bands) == sorted(KEYS)
    truth = {
        "node": MESH.host, "stage": lambda rank: f"Stage {MESH.place(rank)[0]}",
        "group:data": lambda rank: MESH.place(rank)[::2], "group:tensor": lambda rank: rank // 4,
        "group:pipeline": lambda rank: MESH.place(rank)[1:],
    }  # fmt: skip
    for key, band in bands.items():
        seen: dict[Any, str] = {}
        for row, place in zip(answer["rows"], band["lanes"], strict=True):
            own = {truth[key](rank) for rank in row["ranks"]}
            assert (place >= 0) == (len(own) == 1)
            if place >= 0:
                name = band["names"][place]
                assert seen.setdefault(own.pop(), name) == name
        assert len(set(seen.values())) == len(seen)
    if lanes == 48:
        assert "Stage 2" in bands["stage"]["names"]
        assert "Ranks 0-3" in bands["group:tensor"]["names"]
        assert "Ranks 1, 5 and 1 more" in bands["group:data"]["names"]


def test_groups_that_come_later_are_seen_and_ranks_of_none_come_last(sender: Sender) -> None:
    def group(name: str, ranks: list[int]) -> schema.GroupDefined:
        return schema.GroupDefined(
            attempt=0, rank=0, time_ns=1, group=name, ranks=ranks, backend="gloo",
            description="tensor",
        )  # fmt: skip

    sender.send(
        schema.RunStarted(attempt=0, rank=-1, time_ns=1, name="r", command=[], world_size=5),
        *(schema.RankRegistered(attempt=0, rank=rank, time_ns=1, world_size=5, local_rank=rank,
                                local_world_size=5, node_rank=0, host="node-a", pid=rank + 1)
          for rank in range(5)),
        chunks=[steps(rank, 50.0, 10**18, 20) for rank in range(5)],
    )  # fmt: skip
    assert sender.get("/map")["bands"] == []
    sender.send(group("a", [1, 4]), group("b", [0, 3]))
    answer = sender.get("/map", order="group:tensor")
    assert [(row["group"], row["ranks"]) for row in answer["rows"]] == [
        ("Ranks 0, 3", [0]), ("Ranks 0, 3", [3]), ("Ranks 1, 4", [1]), ("Ranks 1, 4", [4]),
        ("no group", [2]),
    ]  # fmt: skip
    (band,) = answer["bands"]
    assert (band["key"], band["title"], band["lanes"]) == (
        "group:tensor", "Tensor group", [0, 0, 1, 1, -1],
    )  # fmt: skip


def test_a_long_lane_says_that_its_list_is_cut() -> None:
    ranks = known([0.0] * (MAX_RANKS_SHOWN + 1))
    (row,) = rows_of(choose_lanes("rank", ranks, 1), ranks)
    assert row.ranks_capped is not None
    assert (row.ranks_capped.shown, row.ranks_capped.total) == (
        MAX_RANKS_SHOWN,
        MAX_RANKS_SHOWN + 1,
    )


def test_no_rank_at_all_has_no_lane() -> None:
    for order in ORDERS:
        lanes = choose_lanes(order, known([]), 9)
        assert rows_of(lanes, known([])) == []


def test_more_nodes_than_lanes_can_be_is_said() -> None:
    hosts = [f"node-{number}" for number in range(3_000)]
    with pytest.raises(Problem, match="3,000 groups"):
        choose_lanes("node", known([0.0] * 3_000, hosts), 200)


def test_an_unknown_order_names_its_field(seeded: Sender) -> None:
    url = f"/api/v1/runs/{seeded.run_id}/map"
    reply = seeded.client.get(url, params={"order": "mood"})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "order")
    lines = seeded.client.get(url, params={"order": "worst", "format": "csv"}).text.splitlines()
    assert lines[0].startswith("label,ranks,worst_rank,host,group")
    assert lines[1].startswith("Rank 2,2,2,node-b")
