"""Where this server is behind, what it said of a live run before is not said of now."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope_server.alerts.evaluate import STALE_SECONDS
from rankscope_server.api.runs.old_answers import as_of_now
from rankscope_server.api.runs.schema import ShortAnswer
from tests.server.conftest import TestClient
from tests.server.seed import seed_with

HEALTHY = ShortAnswer(state="healthy", text="Healthy: 4 ranks")
LATE = STALE_SECONDS + 30


@pytest.mark.parametrize("state", ["healthy", "advice"])
def test_health_of_a_live_run_is_not_known_where_the_server_is_behind(state: Any) -> None:
    said = ShortAnswer(state=state, text="Healthy: 4 ranks")
    old = as_of_now(said, "running", LATE)
    assert (old.state, old.text) == (
        "unknown", "No verdict: Rankscope is behind by 90 s; before: Healthy: 4 ranks"
    )  # fmt: skip
    assert as_of_now(said, "running", STALE_SECONDS) == said
    assert as_of_now(said, "ended", LATE) == said


def test_a_culprit_stays_one() -> None:
    said = ShortAnswer(state="culprit", text="Rank 3 hangs")
    assert as_of_now(said, "stuck", LATE) == said


def test_pages_and_lists_say_it(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_with(lambda body: client.post("/api/v1/ingest", content=body,
                                       headers={"Content-Encoding": "zstd"}),
              run_id="run", ranks=2, steps=60, fault="none", end=False)  # fmt: skip
    app: Any = client.app
    service = app.state.service
    service.analysis.look_now()

    def answers() -> set[tuple[str, str]]:
        page = client.get("/api/v1/runs/run").json()
        (row,) = client.get("/api/v1/runs").json()["runs"]
        found = [page["answer"], page["run"]["answer"], row["answer"]]
        return {(one["state"], one["text"].partition(";")[0]) for one in found}

    ((state, before),) = answers()
    assert state == "healthy", before
    monkeypatch.setattr(type(service), "behind_seconds", lambda _self, _run: LATE)
    assert answers() == {("unknown", "No verdict: Rankscope is behind by 90 s")}
