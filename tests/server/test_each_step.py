"""Each step of the job: who was slow in it, what was waited, and which step comes next."""

from __future__ import annotations

import csv
import io

import pytest

from rankscope_server.api.steps import each
from tests.server.conftest import TestClient, poster
from tests.server.seed import seed_with

RANKS, SLOW, STEPS = 4, 2, 200


@pytest.fixture
def run(client: TestClient) -> str:
    name = seed_with(poster(client), ranks=RANKS, slow_rank=SLOW, steps=STEPS)
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    return f"/api/v1/runs/{name}"


def test_the_slow_rank_is_that_of_each_step_since_its_onset(client: TestClient, run: str) -> None:
    page = client.get(run).json()
    onset = page["verdict"]["onset_step"]
    answer = client.get(f"{run}/steps").json()
    assert (answer["num_expected"], answer["last_step"]) == (RANKS, STEPS)
    assert [row["step"] for row in answer["steps"]] == list(range(1, STEPS + 1))
    since = [row for row in answer["steps"] if row["step"] >= onset]
    assert {row["slowest_rank"] for row in since} == {SLOW}
    assert min(row["slowest_ratio"] for row in since) > 1.1
    before = [row["slowest_rank"] for row in answer["steps"] if row["step"] < onset]
    assert set(before) == set(range(RANKS))  # by chance


def test_waiting_is_that_of_the_overview(client: TestClient, run: str) -> None:
    (shown,) = (one for one in client.get(run).json()["numbers"] if one["key"] == "waiting")
    recent = client.get(f"{run}/steps?from={STEPS - 49}").json()["steps"]
    mean = sum(row["waiting_ratio"] for row in recent) / len(recent)
    assert mean == pytest.approx(shown["value"], rel=0.02)  # that one weighs by time


def test_many_steps_come_in_parts(
    client: TestClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = client.get(f"{run}/steps").json()["steps"]
    monkeypatch.setattr(each, "MAX_STEPS", 64)
    rows, begin = [], 1
    while begin is not None:
        part = client.get(f"{run}/steps?from={begin}").json()
        assert len(part["steps"]) <= 64
        rows, begin = rows + part["steps"], part["next_step"]
    assert rows == whole
    table = client.get(f"{run}/steps?format=csv").text
    assert len(list(csv.DictReader(io.StringIO(table)))) == 64
