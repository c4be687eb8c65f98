"""How ranks share the work: meshes from groups, and what a pipeline idles, against plain loops."""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.api.groups.mesh import Group, families_of, layout_of
from rankscope_server.api.parallelism.pipeline import ideal_of, pipeline_over
from rankscope_server.api.parallelism.queries import parallelism
from rankscope_server.api.runs.queries import run_row
from tests.server.conftest import DATABASES, Sender, poster, serving, url_of
from tests.server.jobs_sent import send_job
from tests.simulator.job import Fault, Job

SLOW_RANK = 619
BIG = Job(
    data=16, tensor=8, pipeline=8, steps=40, microbatches=12, tells_numbers=True, seed=3,
    faults=(Fault("slow_compute", rank=SLOW_RANK, start=10, size=0.6),),
)  # fmt: skip
MAX_CPU_SECONDS = 0.1
MAX_BYTES = 300_000


# --- the mesh ---------------------------------------------------------------------------------


def groups_of(sizes: dict[str, int], describe: str, shuffled: list[int]) -> list[Group]:
    """Return the groups along each axis of a mesh whose cells hold the ranks in this order."""
    grid = np.array(shuffled).reshape(list(sizes.values()))
    found = [Group("world", tuple(range(grid.size)), "nccl", "default_pg")]
    for place, name in enumerate(sizes):
        rows = np.moveaxis(grid, place, -1).reshape(-1, grid.shape[place])
        found += [
            Group(f"{number:x}{place}", tuple(row), "nccl", describe.format(name))
            for number, row in enumerate(rows.tolist())
        ]
    return found


@pytest.mark.parametrize("describe", ["mesh_{}", ""])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        {"pipeline": 2, "data": 2, "tensor": 2},
        {"pipeline": 4, "data": 3, "tensor": 2},
        {"pipeline": 8, "data": 16, "tensor": 8},
        {"pipeline": 2, "data": 2, "context": 3, "tensor": 2},
    ],
)
def test_every_rank_gets_its_coordinates(sizes: dict[str, int], describe: str) -> None:
    number = int(np.prod(list(sizes.values())))
    groups = groups_of(sizes, describe, list(range(number)))
    families = families_of(groups, number, {})
    layout = layout_of(families, range(number), {})
    assert [axis.size for axis in layout.axes] == list(sizes.values())
    if describe:
        assert [axis.name for axis in layout.axes] == list(sizes)
    expected = itertools.product(*map(range, sizes.values()))
    assert [layout.at[rank] for rank in range(number)] == list(expected)
    assert [family.name for family in families if not family.is_axis] == ["all ranks"]


def test_a_mesh_whose_ranks_lie_in_any_order_is_found_by_its_names() -> None:
    order = np.random.default_rng(7).permutation(24).tolist()
    sizes = {"pipeline": 4, "data": 3, "tensor": 2}
    families = families_of(groups_of(sizes, "mesh_{}", order), 24, {})
    layout = layout_of(families, range(24), {})
    assert {axis.name: axis.size for axis in layout.axes} == sizes
    names = [axis.name for axis in layout.axes]
    for at, rank in zip(itertools.product(range(4), range(3), range(2)), order, strict=True):
        known = dict(zip(names, layout.at[rank], strict=True))
        assert (known["pipeline"], known["data"], known["tensor"]) == at


def test_groups_over_several_axes_are_none_and_a_direction_without_groups_is_said() -> None:
    sizes = {"data": 2, "tensor": 4}
    both = [Group("x", tuple(range(8)), "nccl", "mesh_data_tensor")]
    families = families_of([*groups_of(sizes, "mesh_{}", list(range(8))), *both], 8, {})
    layout = layout_of(families, range(8), {})
    assert [axis.name for axis in layout.axes] == ["data", "tensor"]
    only = [
        group
        for group in groups_of(sizes, "mesh_{}", list(range(8)))
        if "data" not in group.description
    ]
    layout = layout_of(families_of(only, 8, {}), range(8), {})
    assert [(axis.name, axis.family is None) for axis in layout.axes] == [
        ("no group", True), ("tensor", False),
    ]  # fmt: skip
    assert layout.at[5] == (1, 1)


def test_stages_name_the_pipeline_and_order_it() -> None:
    stage_of = {0: 1, 1: 0, 2: 1, 3: 0}
    groups = [
        Group("a1", (0, 1)), Group("b1", (2, 3)), Group("c2", (0, 2)), Group("d2", (1, 3)),
    ]  # fmt: skip
    layout = layout_of(families_of(groups, 4, stage_of), range(4), stage_of)
    names = [axis.name for axis in layout.axes]
    assert names == ["2 apart", "pipeline"]
    assert [layout.at[rank][1] for rank in range(4)] == [1, 0, 1, 0]


def test_groups_that_lie_across_each_other_make_no_false_mesh() -> None:
    groups = [Group("a", (0, 1, 2)), Group("b", (3, 4, 5)), Group("c", (0, 3)), Group("d", (1, 5))]
    families = families_of(groups, 6, {})
    layout = layout_of(families, range(6), {})
    assert len(set(layout.at.values())) == 6
    assert [family.size for family in families if family.is_axis] == [3]
    assert layout_of([], range(3), {}).axes[0].name == "rank"
    servers = families_of([Group("w", (0, 1)), Group("all", (0, 1, 2))], 3, {})
    layout_of(servers, range(3), {})
    assert [(family.size, family.is_axis) for family in servers] == [(2, False), (3, True)]


# --- the pipeline -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "chunks", "ideal"),
    [
        ("ScheduleGPipe", 4, 8, 1, 3 / 11),
        ("Schedule1F1B", 4, 12, 1, 3 / 15),
        ("ScheduleInterleaved1F1B", 2, 8, 2, 1 / 17),
        ("ScheduleZBVZeroBubble", 2, 8, 2, None),
        ("Schedule1F1B", 2, 0, 1, None),
        ("", 3, 6, 1, 2 / 8),
    ],
)
def test_the_ideal_is_that_of_the_schedule(
    schedule: str, ranks: int, microbatches: int, chunks: int, ideal: float | None
) -> None:
    share, text = ideal_of(schedule, ranks, microbatches, chunks)
    assert share == (None if ideal is None else pytest.approx(ideal))
    assert text


def planes_of(own: list[float], step_ms: float, steps: int = 30) -> dict[str, Any]:
    rows = np.repeat(np.array(own, float)[:, None], steps, 1)
    return {
        "own": rows, "duration": np.full(rows.shape, step_ms), "forward": rows / 3,
        "backward": rows / 3, "microbatches": np.full(rows.shape, 4.0),
    }  # fmt: skip


def test_even_stages_fill_and_drain_longer_than_the_others_of_a_slow_first_one() -> None:
    """Such a step took 778 ms on real ranks, one of even stages 675."""
    planes = planes_of([705, 258, 485, 485], 778)
    planes["backward"] = planes["own"] * 2 / 3
    found = pipeline_over(planes, {n: n for n in range(4)}, (4, 8, "Schedule1F1B"), (1, 30))
    assert found is not None
    assert found.even_gain == pytest.approx(1 - 483.25 * 11 / 8 / 778)


def test_the_longest_stage_and_what_even_ones_would_give() -> None:
    planes = planes_of([60, 60, 90, 90, 60, 60], 120)
    stage_of = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    found = pipeline_over(planes, stage_of, (3, 4, "Schedule1F1B"), (1, 30))
    assert found is not None
    assert found.idle_ratio == pytest.approx(1 - 70 / 120)
    assert found.ideal_ratio == pytest.approx(2 / 6)
    assert found.even_gain == pytest.approx((90 - 70) / 120), "of the step"
    assert [stage.own_ms for stage in found.stages] == [60, 90, 60]
    assert found.stages[1].others_ratio == pytest.approx(1.5)
    assert found.stages[1].forward_ms == pytest.approx(90 / 3 / 4)
    planes["own"][2:4] = np.nan
    unknown = pipeline_over(planes, stage_of, (3, 4, "Schedule1F1B"), (1, 30))
    assert unknown is not None
    assert unknown.idle_ratio is None
    assert [stage.own_ms for stage in unknown.stages] == [None, None, None]


# --- the route --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DATABASES)
def big(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Sender]:
    """1,024 ranks in three dimensions, one of them slow."""
    with serving(tmp_path_factory.mktemp("big"), url_of(request)) as client:
        send_job(poster(client), "run", BIG)
        yield Sender(client)


def test_1024_ranks_lie_where_the_job_put_them(big: Sender) -> None:
    found = big.get("/parallelism")
    mesh = found["mesh"]
    assert [(axis["name"], axis["size"]) for axis in mesh["axes"]] == [
        ("pipeline", 8), ("data", 16), ("tensor", 8),
    ]  # fmt: skip
    assert [tuple(at) for at in mesh["at"]] == [BIG.place(rank) for rank in range(BIG.num_ranks)]
    assert mesh["stage"] == [BIG.place(rank)[0] for rank in range(BIG.num_ranks)]
    assert [mesh["hosts"][place] for place in mesh["host"]] == [
        BIG.host(rank) for rank in range(BIG.num_ranks)
    ]
    ratio = next(value for value in mesh["values"] if value["key"] == "own_ratio")
    assert int(np.argmax(ratio["values"])) == SLOW_RANK
    assert ratio["values"][SLOW_RANK] == pytest.approx(1.6, abs=0.1)
    assert sorted(ratio["values"])[-2] < 1.05
    assert {value["key"] for value in mesh["values"]} > {"loss", "gradient_norm_local"}
    assert found["text"].startswith("Stages 0 to 7 idle ")
    assert f"rank {SLOW_RANK} works 1." in found["text"]
    stages = found["pipeline"]["stages"]
    assert [stage["num_ranks"] for stage in stages] == [128] * 8
    assert stages[4]["longest_rank"] == SLOW_RANK
    assert found["pipeline"]["ideal_ratio"] == pytest.approx(7 / 19)
    axes = {
        family["name"]: family["num_groups"] for family in found["families"] if family["is_axis"]
    }
    assert axes == {"tensor": 128, "data": 64, "pipeline": 128}


def test_it_is_quick_and_small_and_has_a_table(big: Sender) -> None:
    reply = big.client.get("/api/v1/runs/run/parallelism", headers={"Accept-Encoding": "gzip"})
    assert int(reply.headers["content-length"]) < MAX_BYTES
    with big.client.app.state.service.read() as connection:  # type: ignore[attr-defined]
        row = run_row(connection, "run")
        took = []
        for _ in range(5):
            begun = time.process_time()
            parallelism(connection, row)
            took.append(time.process_time() - begun)
    assert min(took) < MAX_CPU_SECONDS
    text = big.client.get("/api/v1/runs/run/parallelism", params={"format": "csv"}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 1_024
    assert rows[SLOW_RANK]["place"] == "pipeline 4, data 13, tensor 3"
    assert float(rows[SLOW_RANK]["own_ratio"]) > 1.4
    assert rows[SLOW_RANK]["rank_memory"] == ""  # no state was sent: unknown


def test_without_a_pipeline_it_says_so_and_shows_the_mesh(seeded: Sender) -> None:
    found = seeded.get("/parallelism")
    assert found["text"] == "No pipeline: 4 ranks, which form one group"
    assert found["pipeline"] is None
    assert found["no_pipeline"] == "no rank holds a stage of a pipeline"
    mesh = found["mesh"]
    assert (mesh["rank"], [axis["size"] for axis in mesh["axes"]]) == ([0, 1, 2, 3], [4])
    assert [(family["name"], family["num_calls"] > 0) for family in found["families"]] == [
        ("all ranks", True)
    ]
    assert found["families"][0]["blocked_ratio"] == 1.0
    blocked = next(value for value in mesh["values"] if value["key"] == "blocked_ratio")
    assert blocked["values"][2] == min(blocked["values"])  # the slow rank waits least
    assert found["staleness"] is None


def registered(rank: int, world_size: int) -> schema.RankRegistered:
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=1, world_size=world_size, local_rank=rank,
        local_world_size=world_size, node_rank=0, host="node-a", pid=rank + 1,
    )  # fmt: skip


@pytest.mark.parametrize("database_url", DATABASES[:1], indirect=True)
def test_staleness_is_that_of_the_recorded_versions(sender: Sender) -> None:
    ages = {0: [0, 1, 1, 3], 1: [2, 2, 2, 2]}
    sender.send(
        *(registered(rank, 2) for rank in ages),
        *(
            schema.Metrics(
                attempt=0, rank=rank, time_ns=step, step=step,
                values={
                    "version_read": 10.0 * step, "version_backward": 10.0 * step + (rank == 1),
                    "version_applied": 10.0 * step + age, "staleness_bound": -1.0,
                },
            )
            for rank, each in ages.items() for step, age in enumerate(each, 1)
        ),
    )  # fmt: skip
    found = sender.get("/parallelism")["staleness"]
    names = ("rank", "p50", "most", "num_mismatched")
    shown = [tuple(one[name] for name in names) for one in found["ranks"]]
    assert shown == [(0, 1, 3, 0), (1, 2, 2, 4)]
    assert found["bound"] == -1
    assert "the oldest, of rank 0, 3 versions; no bound is set" in found["text"]


@pytest.mark.parametrize("database_url", DATABASES[:1], indirect=True)
def test_what_is_not_known_is_said(sender: Sender) -> None:
    sender.send(registered(0, 1))
    alone = sender.get("/parallelism")
    assert alone["text"] == "One rank: it shares its work with no other"
    assert alone["mesh"]["rank"] == [0]
    sender.send(registered(1, 4))
    found = sender.get("/parallelism")
    assert found["text"] == "Not known: no process group has been recorded"
    assert found["mesh"]["host"] == [0, 0, -1, -1]
    values = {value["key"]: value["values"] for value in found["mesh"]["values"]}
    assert values == {"own_ratio": [None] * 4}


@pytest.mark.parametrize("database_url", DATABASES[:1], indirect=True)
def test_only_the_newest_attempt_counts(sender: Sender) -> None:
    small = Job(data=2, tensor=1, pipeline=2, steps=30, microbatches=4)
    send_job(poster(sender.client), "run", small)
    before = sender.get("/parallelism")
    assert (before["step_hi"], before["pipeline"]["num_ranks"]) == (30, 2)
    sender.send(msgspec.structs.replace(registered(0, 2), attempt=1))
    found = sender.get("/parallelism")
    assert (found["attempt"], found["step_lo"], found["step_hi"]) == (1, 1, 0)
    assert found["text"] == "Not known: no process group has been recorded"
    assert {value["num_known"] for value in found["mesh"]["values"]} == {0}
