"""Leases, locks and notices of a store: the same promises on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from rankscope_server.store import shared_leases, tables
from rankscope_server.store.engine import (
    StoreInUseError,
    explain,
    only_server,
    open_engines,
    open_for_leases,
    open_for_notices,
)
from rankscope_server.store.leases import Held, LeaseLostError, Leases, Vitals, said_of
from rankscope_server.store.locks import of_run, take_locks
from rankscope_server.store.notices import CHANNEL, Notice, Notices
from rankscope_server.store.shared_leases import SharedLeases, open_leases
from tests.server.postgres import Postgres
from tests.server.receivers import wait_for

WORK = "analysis of a"


@dataclass(frozen=True)
class Process:
    """What a server process has of a store."""

    leases: Leases
    engine: sa.Engine

    def hold(self) -> Held | None:
        self.leases.hold(WORK, "a")
        self.leases.take()
        return self.leases.hold(WORK, "a")

    def write(self, lease: Held) -> None:
        with self.engine.begin() as connection:
            lease.check(connection)
            connection.execute(sa.insert(tables.event).values(run_id="a", name="written"))

    def num_written(self) -> int:
        with self.engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(tables.event)) or 0


@contextmanager
def process(url: str) -> Iterator[Process]:
    """Open a store as `rankscope serve` does. Raises StoreInUseError."""
    with only_server(url):
        engines = open_engines(url, "normal")
        with open_leases(url, engines[0]) as leases:
            yield Process(leases, engines[0])
        for engine in engines:
            engine.dispose()


@pytest.fixture
def url(tmp_path: Path, database_url: str) -> str:
    return database_url or f"sqlite:///{tmp_path / 'x.db'}"


# --- what holds for both


def test_a_lease_is_held_by_one_process_at_a_time(url: str) -> None:
    with process(url) as first:
        assert first.hold() is not None
        if first.leases.is_shared:
            with process(url) as second:
                assert second.hold() is None
        else:  # there is none
            with pytest.raises(StoreInUseError, match="stop that server or"), process(url):
                pass


def test_a_lease_stays_as_it_is_and_lets_its_owner_write(url: str) -> None:
    with process(url) as first:
        lease = first.hold()
        assert lease is not None
        assert first.hold() == lease
        first.write(lease)
        first.write(lease)
        assert first.num_written() == 2


def test_the_next_owner_has_a_greater_epoch_and_an_earlier_one_writes_no_more(url: str) -> None:
    with process(url) as first:
        before = first.hold()
    assert before is not None
    with process(url) as second:
        after = second.hold()
        assert after is not None
        assert after.epoch > before.epoch
        second.write(after)
        with pytest.raises(LeaseLostError):
            second.write(before)
        assert second.num_written() == 1


# --- what holds for several processes at a time


@pytest.fixture
def shared(postgres: Postgres) -> Iterator[Callable[[], SharedLeases]]:
    """Make the leases of one more process; they renew only when a test says so."""
    url = postgres.create_migrated()
    with ExitStack() as stack:

        def make() -> SharedLeases:
            engine = open_for_leases(url)
            stack.callback(engine.dispose)
            return SharedLeases(engine)

        yield make


def engine_of(leases: SharedLeases) -> sa.Engine:
    return leases._engine


def dies(leases: SharedLeases) -> None:
    """Let the term of a process be over by the clock of the database: it says no more."""
    with engine_of(leases).begin() as connection:
        table = tables.server
        connection.execute(sa.update(table).where(table.c.id == leases.owner).values(expires_ns=1))


def held_by(leases: SharedLeases, name: str = WORK) -> Held | None:
    leases.hold(name, "a")
    leases.renew()
    return leases.hold(name, "a")


def test_what_the_dead_did_is_taken_over_and_the_woken_writes_nothing(
    shared: Callable[[], SharedLeases],
) -> None:
    first, second = shared(), shared()
    before = held_by(first)
    assert before is not None
    assert held_by(second) is None
    dies(first)
    after = held_by(second)
    assert after is not None
    assert (after.epoch, after.owner) == (before.epoch + 1, second.owner)
    with engine_of(first).begin() as connection:
        assert not before.is_held(connection)
        with pytest.raises(LeaseLostError, match="has another owner now"):
            before.check(connection)
    assert held_by(first) is None  # woken, it learns of it with its next renewal
    with engine_of(second).begin() as connection:
        after.check(connection)


def test_who_was_away_and_was_not_missed_goes_on_with_its_epoch(
    shared: Callable[[], SharedLeases],
) -> None:
    first = shared()
    before = held_by(first)
    dies(first)
    assert held_by(first) == before


def test_who_has_not_renewed_holds_nothing(
    shared: Callable[[], SharedLeases], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shared()
    assert held_by(first) is not None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + shared_leases.TERM_SECONDS + 0.1)
    assert first.hold(WORK) is None
    first.renew()
    assert first.hold(WORK) is not None


def test_a_lease_is_not_taken_from_under_a_transaction(
    shared: Callable[[], SharedLeases],
) -> None:
    first, second = shared(), shared()
    before = held_by(first)
    assert before is not None
    dies(first)
    with open_connection(second) as connection, connection.begin():
        before.check(connection)  # as the writer of the first does, on a connection of its own
        assert held_by(second) is None
    assert held_by(second) is not None


@contextmanager
def open_connection(leases: SharedLeases) -> Iterator[sa.Connection]:
    engine = sa.create_engine(engine_of(leases).url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def test_a_renewal_does_not_wait_for_a_transaction_of_its_owner(
    shared: Callable[[], SharedLeases],
) -> None:
    first = shared()
    lease = held_by(first)
    assert lease is not None
    with open_connection(first) as connection, connection.begin():
        lease.check(connection)
        assert held_by(first) == lease  # else it would wait for ever


def test_what_is_given_back_is_taken_by_who_asked(shared: Callable[[], SharedLeases]) -> None:
    first, second = shared(), shared()
    held_by(first)
    assert held_by(second) is None
    first.release(WORK)
    first.renew()
    assert held_by(second) is not None
    assert first.hold("another") is None  # asked for, and not taken before a renewal


def test_an_orderly_end_gives_all_back_at_once(postgres: Postgres) -> None:
    url = postgres.create_migrated()
    with process(url) as second:
        with process(url) as first:
            assert second.hold() is not None
            assert first.hold() is None
            assert first.leases.num_servers == 2
        first_again = second.leases
    with process(url) as third:
        assert third.hold() is not None  # without waiting for a term to end
        assert third.leases.num_servers == 1
    assert first_again.is_shared


def test_each_says_how_it_is_and_hears_the_worst_of_the_others(
    shared: Callable[[], SharedLeases],
) -> None:
    first, second = shared(), shared()
    first.vitals = lambda: Vitals(7.0, 0.5, {WORK: {"state": "idle"}})
    held_by(first)
    held_by(second)
    assert (second.others.behind_seconds, second.others.queue_ratio) == (7.0, 0.5)
    assert (first.num_servers, second.num_servers) == (1, 2)
    with engine_of(second).connect() as connection:
        assert said_of(connection, WORK) == {"state": "idle"}
        assert said_of(connection, "unknown") is None
    assert first.others == Vitals()


def test_work_without_an_owner_is_behind(shared: Callable[[], SharedLeases]) -> None:
    first, second = shared(), shared()
    lease = held_by(first)
    assert lease is not None
    dies(first)
    with open_connection(second) as connection, connection.begin():
        lease.check(connection)  # a stopped process in the middle of a transaction
        held_by(second)
        assert second.others.behind_seconds > shared_leases.TERM_SECONDS
    assert held_by(second) is not None
    assert second.others.behind_seconds == 0.0


def test_a_process_that_is_stopped_in_a_transaction_loses_it(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope_server.store.engine.STOPPED_SECONDS", 1.0)
    url = postgres.create_migrated()
    stopped, _ = open_engines(url, "normal")
    monkeypatch.undo()
    other, _ = open_engines(url, "normal")
    with stopped.connect() as connection:
        take_locks(connection, {of_run("a")})
        with other.begin() as waiting:
            take_locks(waiting, {of_run("a")})  # waits until the first is ended
        with pytest.raises(sa.exc.DBAPIError) as failure:
            connection.execute(sa.text("SELECT 1"))
    reason = explain(failure.value)
    assert reason is not None  # 503: the sender repeats
    for engine in (stopped, other):
        engine.dispose()


def test_locks_are_taken_in_one_order_whatever_order_they_are_named_in(
    postgres: Postgres,
) -> None:
    url = postgres.create_migrated()
    names = [of_run(str(number)) for number in range(50)]

    def work(order: list[str], engine: sa.Engine) -> None:
        for _ in range(20):
            with engine.begin() as connection:
                take_locks(connection, set(order))

    engines = [open_engines(url, "normal")[0] for _ in range(2)]
    failures: list[BaseException] = []

    def run(order: list[str], engine: sa.Engine) -> None:
        try:
            work(order, engine)
        except sa.exc.DBAPIError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(order, engine))
        for order, engine in zip((names, names[::-1]), engines, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.dispose()
    assert not failures


def test_two_processes_migrate_an_empty_database_one_after_the_other(postgres: Postgres) -> None:
    url = postgres.create()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for engine in open_engines(url, "normal"):
                engine.dispose()
        except sa.exc.SQLAlchemyError as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- what processes tell each other


def test_notices_are_heard_by_the_others_alone_and_foreign_ones_ignored(
    postgres: Postgres,
) -> None:
    url = postgres.create_migrated()
    heard: dict[str, list[Notice]] = {"a": [], "b": []}
    engine = open_for_notices(url)
    pair = {name: Notices(engine, name, heard[name].append, lambda: None) for name in heard}
    for one in pair.values():
        one.start()
    with engine.connect() as connection:
        wait_for(lambda: listeners(connection) == len(pair), "both listen")
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, "no notice of ours")))
    pair["a"].say("run:x", ("steps",), 7)
    pair["b"].say("runs")
    wait_for(lambda: heard["a"] and heard["b"], "each hears the other")
    for one in pair.values():
        one.close()
    assert heard == {"b": [Notice("a", "run:x", ("steps",), 7)], "a": [Notice("b", "runs")]}


def test_a_break_is_told_since_hints_may_be_lost(postgres: Postgres) -> None:
    url = postgres.create_migrated()
    engine = open_for_notices(url)
    gaps: list[bool] = []
    heard: list[Notice] = []
    notices = Notices(engine, "a", heard.append, lambda: gaps.append(True))
    notices.start()
    with engine.connect() as connection:
        wait_for(lambda: listeners(connection), "it listens")
        assert not gaps
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query = :listen"
            ),
            {"listen": f"LISTEN {CHANNEL}"},
        )
        wait_for(lambda: gaps, "the break is told")
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, '{"sender":"b","topic":"runs"}')))
        wait_for(lambda: heard, "it hears again")
    notices.close()


def listeners(connection: sa.Connection) -> int:
    found = sa.text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query = :listen AND state = 'idle'"
    )
    return int(connection.execute(found, {"listen": f"LISTEN {CHANNEL}"}).scalar_one())
