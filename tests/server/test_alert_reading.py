"""What rules look at is what is stored, whatever was left unread for being quiet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.alerts.reading import DEAF_RATIO, DEAF_SECONDS, Delays, Reader
from rankscope_server.prices import Rate, price_list
from rankscope_server.store import tables
from rankscope_server.store.unit import Unit
from tests.server.conftest import TestClient

S = 10**9


class Store:
    """A store that tests fill, and a reader of it."""

    def __init__(self, client: TestClient) -> None:
        app: Any = client.app
        self.service = app.state.service
        self.now_ns = time.time_ns()
        self.queue_ratio = self.intake_seconds = 0.0
        self.reader = Reader(
            3_600.0, 3_600.0,
            Delays(lambda: 0.0, lambda: self.intake_seconds, lambda: self.queue_ratio),
            "", hearing_since_ns=1,
        )  # fmt: skip
        self.read()  # the first reading of a server begins to hear

    def insert(self, table: sa.Table, *rows: dict[str, Any]) -> None:
        def work(unit: Unit) -> None:
            unit.connection.execute(sa.insert(table), list(rows))

        self.service.writer.run(work)

    def run(self, run_id: str, ages_s: list[float], **more: Any) -> None:
        values = {"run_id": run_id, "status": "running", "received_ns": self.now_ns} | more
        self.insert(tables.run, values)
        rows = [
            {"run_id": run_id, "attempt": 0, "rank": n, "host": f"n{n}",
             "received_ns": self.now_ns - int(age * S)}
            for n, age in enumerate(ages_s)
        ]  # fmt: skip
        self.insert(tables.rank, *rows)

    def read(self, silence_s: float | None = 60.0, store_s: float = 0.0) -> dict[str, Any]:
        with self.service.read() as connection:
            seen = self.reader.read(connection, self.now_ns, store_s, silence_s)
        return {run.run_id: run for run in seen.runs}


@pytest.fixture
def store(client: TestClient) -> Store:
    return Store(client)


def test_ranks_are_read_where_one_may_be_silent(store: Store) -> None:
    store.run("fresh", [1, 2])
    store.run("quiet", [1, 61])
    store.run("over", [99], status="ended")
    store.run("imported", [99], launcher=IMPORTED)
    found = store.read()
    assert {name: len(run.ranks) for name, run in found.items()} == {
        "fresh": 0, "quiet": 2, "over": 0,
    }  # fmt: skip
    assert not any(run.ranks for run in store.read(None).values())


def test_ranks_of_earlier_attempts_are_not_silent(store: Store) -> None:
    store.run("again", [99], attempt=1)
    store.insert(
        tables.rank,
        {"run_id": "again", "attempt": 1, "rank": 0, "host": "n", "received_ns": store.now_ns},
    )
    assert store.read()["again"].ranks == ()


def test_a_collector_that_was_started_again_is_heard(store: Store) -> None:
    store.run("r", [1])
    old, new = store.now_ns - 99 * S, store.now_ns
    store.insert(
        tables.producer,
        {"run_id": "r", "producer": "a", "host": "n0", "received_ns": old},
        {"run_id": "r", "producer": "b", "host": "n0", "received_ns": new},
        {"run_id": "r", "producer": "c", "host": "n1", "received_ns": old},
    )
    run = store.read()["r"]
    assert {one.host: one.heard_ns for one in run.collectors} == {"n0": new, "n1": old}
    assert len(run.ranks) == 1  # a silent collector is a reason to look at the ranks


@pytest.mark.parametrize(
    "deafen",
    [
        lambda store: store.read(store_s=DEAF_SECONDS + 1),
        lambda store: (setattr(store, "queue_ratio", DEAF_RATIO + 0.1), store.read()),
        lambda store: (setattr(store, "intake_seconds", DEAF_SECONDS + 1), store.read()),
        lambda store: (setattr(store.reader, "_read", time.monotonic() - 99_999), store.read()),
    ],
)
def test_silence_counts_from_when_the_server_could_hear(
    store: Store, deafen: Callable[[Store], object]
) -> None:
    store.reader.hearing_since_ns = 1
    store.read()
    assert store.reader.hearing_since_ns == 1
    deafen(store)
    assert store.reader.hearing_since_ns == store.now_ns
    store.queue_ratio, store.intake_seconds, heard_ns = 0.0, 0.0, store.now_ns
    store.now_ns += S
    store.read()
    assert store.reader.hearing_since_ns == heard_ns  # and from there on it hears


def test_what_changed_is_read_again_and_what_is_long_over_is_not(store: Store) -> None:
    store.run("r", [1])
    row = {"run_id": "r", "attempt": 0, "opened_ns": 1, "body": '{"what": "a"}'}
    store.insert(
        tables.finding,
        row | {"key": "1", "state": "open", "updated_ns": 5},
        row | {"key": "2", "state": "recovered", "updated_ns": 5},
        row | {"key": "3", "state": "recovered", "updated_ns": store.now_ns},
    )
    first = store.read()["r"].findings
    assert [(one.what, one.is_over) for one in first] == [("a", False), ("a", True)]
    table = tables.finding

    def work(unit: Unit) -> None:
        changed = {"body": '{"what": "b"}', "updated_ns": 6}
        unit.connection.execute(sa.update(table).where(table.c.key == "1").values(changed))

    store.service.writer.run(work)
    assert [one.what for one in store.read()["r"].findings] == ["b", "a"]


def test_what_is_lost_of_a_run_is_counted(store: Store) -> None:
    """What agents dropped, what lacks between batches, what was refused; of the run alone."""
    store.run("r", [1], refused=3)
    store.run("well", [1])
    row = {"run_id": "r", "host": "n0", "received_ns": store.now_ns, "refused": 0, "bytes": 0}
    store.insert(
        tables.producer,
        row | {"producer": "a", "first_sequence": 1, "last_sequence": 9, "received": 7},
        row | {"producer": "b", "first_sequence": 5, "last_sequence": 5, "received": 1},
    )
    loss = {"run_id": "r", "producer_id": 1, "rank": 0, "time_ns": 1}
    store.insert(
        tables.loss,
        loss | {"source": "collectives", "reason": "ring full", "host": "n0", "count": 40},
        loss | {"source": "logs", "reason": "too fast", "host": "n1", "count": 60},
    )
    assert store.read()["r"].lost.total == 3  # the rest is read where a rule asks for it
    with store.service.read() as connection:
        seen = store.reader.read(connection, store.now_ns, 0.0, None, with_losses=True)
    runs = {run.run_id: run for run in seen.runs}
    lost = runs["r"].lost
    assert (lost.records, lost.batches, lost.refused, lost.total) == (100, 2, 3, 105)
    assert lost.worst == "most on n1: 60 logs, too fast"
    assert runs["well"].lost.total == 0


def test_what_runs_have_spent_is_read_where_a_rule_asks_for_it(store: Store) -> None:
    store.run("dear", [1, 1], cost='{"wall_seconds": 7200.0, "parts": {}}')
    store.run("new", [1])
    assert store.read()["dear"].spent_rank_hours is None
    store.reader.prices = price_list("n0=3,n1=5", "EUR")
    with store.service.read() as connection:
        seen = store.reader.read(connection, store.now_ns, 0.0, None, with_spent=True)
    found = {run.run_id: (run.spent_rank_hours, run.rate) for run in seen.runs}
    assert found == {"dear": (2.0, Rate(4.0, "EUR", 2, 4.0)), "new": (None, None)}
