"""Series of runs at /metrics: what they say of a run, what stays out, and what is not known."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from rankscope.wire import schema
from rankscope_server.api import run_series
from rankscope_server.store import tables
from tests.server.conftest import Sender, TestClient, log_line, poster
from tests.server.seed import seed_with

RANKS, SLOW = 4, 2


def series(client: TestClient, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of one family by its labels: the run, then the others by their names."""
    reply = client.get("/metrics")
    assert reply.status_code == 200
    return {
        tuple(
            sample.labels[name] for name in sorted(sample.labels, key=lambda n: (n != "run", n))
        ): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
        if sample.name == f"rankscope_run_{name}"
    }


def look(client: TestClient) -> None:
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]


@pytest.fixture
def live(client: TestClient) -> str:
    """A live run in which one rank is slow, looked at."""
    name = seed_with(poster(client), ranks=RANKS, slow_rank=SLOW, steps=200, end=False)
    look(client)
    return name


def test_a_run_says_who_is_at_fault_and_at_what_cost(client: TestClient, live: str) -> None:
    api = client.get(f"/api/v1/runs/{live}").json()
    assert api["answer"]["state"] == "culprit"
    assert series(client, "answer") == {
        (live, state): float(state == "culprit")
        for state in ("culprit", "advice", "healthy", "waiting", "unknown")
    }
    cost = api["verdict"]["cost_throughput_ratio"]
    assert series(client, "verdict_cost_ratio") == {(live,): pytest.approx(cost)}
    assert series(client, "rank_cost_ratio") == {
        (live, "node-b", api["verdict"]["kind"], str(SLOW)): pytest.approx(cost)
    }
    assert series(client, "step") == {(live,): 200}
    assert series(client, "info") == {(live, "torchrun", f"{live} gpt", "default"): 1}


def test_ranks_are_counted_by_what_they_do(client: TestClient, live: str) -> None:
    wanted = {"expected": RANKS, "reporting": RANKS, "silent": 0, "ended": 0}
    assert series(client, "ranks") == {(live, state): n for state, n in wanted.items()}
    service = client.app.state.service  # type: ignore[attr-defined]

    def age(unit: Any) -> None:
        old = time.time_ns() - int(2e9 * service.silent_after_seconds(live))
        table = tables.rank
        unit.connection.execute(sa.update(table).where(table.c.rank == 0).values(received_ns=old))

    service.writer.run(age)
    found = series(client, "ranks")
    assert (found[live, "silent"], found[live, "reporting"]) == (1, RANKS - 1)


def test_open_findings_equal_those_of_the_api(client: TestClient, live: str) -> None:
    findings = client.get(f"/api/v1/runs/{live}/findings").json()["open"]
    severities = [each["severity"] for each in findings]
    assert series(client, "open_findings") == {
        (live, name): severities.count(name) for name in ("critical", "warning", "info")
    }
    assert sum(series(client, "open_findings").values()) > 0


def test_the_ledger_is_that_of_the_cost(client: TestClient, live: str) -> None:
    found = series(client, "rank_seconds")
    service = client.app.state.service  # type: ignore[attr-defined]
    with service.read() as connection:
        stored = connection.scalar(sa.select(tables.run.c.cost))
    parts = json.loads(stored)["parts"]
    assert {part: value for (_, part), value in found.items()} == pytest.approx(parts)
    assert found[live, "straggling"] > 0


def test_what_is_not_known_has_no_series(client: TestClient, sender: Sender) -> None:
    sender.send(log_line("x"))  # of a run that no look has seen
    assert series(client, "answer")[sender.run_id, "waiting"] == 1
    assert series(client, "verdict_cost_ratio") == {}
    assert series(client, "rank_seconds") == {}


def test_losses_and_batches_that_did_not_come_are_counted(
    client: TestClient, sender: Sender
) -> None:
    lost = schema.Loss(
        attempt=0, rank=0, time_ns=time.time_ns(), source="logs", reason="ring full", count=7
    )
    sender.send(lost, log_line("x"))
    sender.sequence += 3
    sender.send(log_line("y"))
    assert series(client, "records_lost") == {(sender.run_id,): 7}
    assert series(client, "batches_missing") == {(sender.run_id,): 3}


def test_only_the_newest_runs_have_series_and_the_others_are_counted(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_series, "MAX_RUNS", 3)
    for number in range(5):
        seed_with(poster(client), run_id=f"run-{number}", ranks=2, steps=5, fault="none", end=False)
    names = {labels[0] for labels in series(client, "info")}
    assert len(names) == 3
    assert series(client, "series_left_out") == {(): 2}


def test_a_run_that_is_over_stays_a_while(
    client: TestClient, sender: Sender, aged: Callable[[str, float], None]
) -> None:
    name = seed_with(poster(client), steps=20, fault="none")
    look(client)
    assert series(client, "status")[name, "ended"] == 1
    assert series(client, "ranks")[name, "silent"] == 0
    aged(name, 3600.0)
    assert series(client, "status") == {}


@pytest.fixture
def aged(client: TestClient) -> Callable[[str, float], None]:
    """Return what makes the last batch of a run so many seconds older."""

    def age(run_id: str, seconds: float) -> None:
        table = tables.run

        def work(unit: Any) -> None:
            unit.connection.execute(
                sa.update(table)
                .where(table.c.run_id == run_id)
                .values(received_ns=table.c.received_ns - int(seconds * 1e9))
            )

        client.app.state.service.writer.run(work)  # type: ignore[attr-defined]

    return age


def test_names_of_runs_cannot_break_the_lines(client: TestClient) -> None:
    name = 'a"b\\c\nd'
    seed_with(poster(client), run_id="odd", name=name, ranks=2, steps=5, fault="none", end=False)
    assert [labels[2] for labels in series(client, "info")] == [name]


def test_the_servers_own_counters_come_without_a_database(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, live: str
) -> None:
    def fail(*_: Any) -> Any:
        raise sa.exc.OperationalError("SELECT", {}, Exception("away"))

    monkeypatch.setattr(run_series, "_runs", fail)
    assert series(client, "series_up") == {(): 0}
    assert series(client, "info") == series(client, "series_left_out") == {}
    assert "rankscope_ingest_batches_total" in client.get("/metrics").text
