"""Earlier runs of the same command are found in the store, and a slower run is told of them."""

from __future__ import annotations

import sqlalchemy as sa

from rankscope_server.analysis.baselines import earlier_runs
from rankscope_server.store import tables
from tests.server.conftest import TestClient
from tests.server.runs_sent import send_run


def test_a_slower_run_is_compared_with_earlier_ones_of_its_command(client: TestClient) -> None:
    for number in range(5):
        send_run(client, f"old-{number}", number, 100.0 + 0.1 * number, "train.py", "2.27.3")
    send_run(client, "other", 6, 50.0, "other.py", "2.27.3")
    run = send_run(client, "new", 7, 106.0, "train.py", "2.27.5")
    service = client.app.state.service  # type: ignore[attr-defined]
    with service.reader.connect() as connection:
        found = earlier_runs(connection, "new")
        assert [one.run_id for one in found] == [f"old-{number}" for number in range(5)]
        assert [round(one.step_ms) for one in found] == [100] * 5
        assert found[0].facts["nccl"] == "2.27.3"
        assert found[0].phases_ms["forward"] == 30.0
        assert earlier_runs(connection, "old-0") == ()
    service.analysis.look_now()
    (finding,) = [one for one in run.get("/findings")["open"] if one["kind"] == "regression"]
    assert "5.8 % slower than the last 5 runs" in finding["what"]
    assert "nccl 2.27.3 -> 2.27.5" in finding["why"]
    assert "backward holds" in finding["why"]


def test_runs_of_another_project_are_no_earlier_runs(client: TestClient) -> None:
    for number in range(5):
        send_run(client, f"old-{number}", number, 100.0, "train.py", "2.27.3")
    send_run(client, "new", 7, 106.0, "train.py", "2.27.5")
    service = client.app.state.service  # type: ignore[attr-defined]
    of_others = sa.update(tables.run).where(tables.run.c.run_id.in_(["old-1", "old-3"]))
    service.writer.run(lambda unit: unit.connection.execute(of_others.values(project="alpha")))
    with service.reader.connect() as connection:
        found = [one.run_id for one in earlier_runs(connection, "new")]
    assert found == ["old-0", "old-2", "old-4"]
