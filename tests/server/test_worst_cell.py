"""The cell that a bin of the map has its colour from: the cursor names that one."""

from __future__ import annotations

import random

import pytest

from rankscope_server.api.steps.map import MAX_CELLS
from tests.server.conftest import Sender
from tests.server.seed import seed_with


@pytest.fixture
def seeded(sender: Sender) -> Sender:
    sender.run_id = seed_with(
        lambda body: sender.client.post("/api/v1/ingest", content=body,
                                        headers={"Content-Encoding": "zstd"}),
        ranks=6, steps=90, slow_rank=4, slow_from=60,
    )  # fmt: skip
    return sender


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_worst_of_all_its_cells(seeded: Sender, seed: int) -> None:
    rng = random.Random(seed)
    lo = rng.randint(1, 85)
    hi = rng.randint(lo, min(lo + 7, 90))
    ranks = sorted(rng.sample(range(6), rng.randint(1, 6)))
    cells = [seeded.get("/cell", rank=rank, step=step)
             for rank in ranks for step in range(lo, hi + 1)]  # fmt: skip
    asked = {"ranks": ",".join(map(str, ranks)), "from": lo, "to": hi}
    by_ratio = seeded.get("/cell/worst", **asked)
    assert by_ratio == max(cells, key=lambda cell: cell["ratio"])
    by_time = seeded.get("/cell/worst", metric="step", **asked)
    assert by_time["step_ms"] == max(cell["step_ms"] for cell in cells)


def test_ranges_of_ranks(seeded: Sender) -> None:
    asked = {"from": 61, "to": 90}
    assert seeded.get("/cell/worst", ranks="0-5", **asked)["rank"] == 4
    assert seeded.get("/cell/worst", ranks="0-3,5", **asked)["rank"] != 4


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"ranks": "3-1"}, 422, "ranks"),
        ({"ranks": "a"}, 422, "ranks"),
        ({"ranks": ""}, 422, "ranks"),
        ({"ranks": "77"}, 404, "ranks"),
        ({"metric": "colour"}, 422, "metric"),
        ({"from": 9, "to": 5}, 422, "from"),
    ],
)
def test_what_cannot_be_asked(
    seeded: Sender, changes: dict[str, object], status: int, field: str
) -> None:
    asked = {"ranks": "0", "from": 1, "to": 5} | changes
    path = f"/api/v1/runs/{seeded.run_id}/cell/worst"
    reply = seeded.client.get(path, params=asked)
    assert (reply.status_code, reply.json()["error"]["field"]) == (status, field)


def test_too_many_cells_are_refused(seeded: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope_server.api.steps import map as map_queries

    monkeypatch.setattr(map_queries, "MAX_CELLS", 6 * 10)
    assert MAX_CELLS > 6 * 10
    path = f"/api/v1/runs/{seeded.run_id}/cell/worst"
    reply = seeded.client.get(path, params={"ranks": "0", "from": 1, "to": 11})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "to")
    assert seeded.get("/cell/worst", ranks="0", **{"from": 1, "to": 10})["rank"] == 0
