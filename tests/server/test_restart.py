"""A server that starts again reads on from what it kept, on either database, and all in need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.analysis import keeping, kept, loop
from rankscope_server.analysis.loop import LiveRun
from rankscope_server.analysis.state import RunState
from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.engine import StoreUnavailableError
from rankscope_server.store.unit import Unit
from tests.server.conftest import Sender, TestClient, poster
from tests.server.seed import seed_with

RUN = "kept"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MIN_BATCHES", 1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the chunks that analyses took."""
    steps: list[int] = []
    take = RunState.apply_chunk

    def noted(self: RunState, chunk: schema.Chunk, *rest: Any) -> None:
        if chunk.kind == "steps":
            steps.append(chunk.step_lo)
        take(self, chunk, *rest)

    monkeypatch.setattr(RunState, "apply_chunk", noted)
    return steps


@contextmanager
def server(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield client


def look(client: TestClient) -> LiveRun | None:
    analysis = client.app.state.service.analysis  # type: ignore[attr-defined]
    analysis.look_now()
    found: LiveRun | None = analysis._runs.get(RUN)
    return found


def seed(client: TestClient, **choices: Any) -> None:
    """Send a run of 60 steps that is live, and hangs."""
    plan = {"fault": "hang", "slow_from": 60, "steps": 80, "alive_seconds": 0.0, "seed": 3}
    seed_with(poster(client), run_id=RUN, **plan | choices)


def rows(client: TestClient, table: sa.Table) -> int:
    with client.app.state.service.read() as connection:  # type: ignore[attr-defined]
        count = sa.select(sa.func.count()).select_from(table).where(table.c.run_id == RUN)
        return int(connection.scalar(count) or 0)


def verdict(client: TestClient) -> Any:
    answer = client.get(f"/api/v1/runs/{RUN}").json()
    return answer["verdict"], answer["answer"], client.get(f"/api/v1/runs/{RUN}/findings").json()


def test_a_server_that_ended_reads_on(settings: Settings, read: list[int]) -> None:
    with server(settings) as client:
        seed(client)
        look(client)
        before = verdict(client)
        first = len(read)
        assert first > 0
    with server(settings) as client:
        assert rows(client, tables.analysis_state) == 1
        look(client)
        assert len(read) == first  # not a chunk again
        assert verdict(client) == before
        Sender(client, RUN).send()
        live = look(client)
        assert live is not None
        assert live.state is not None
        assert live.state._attempts[0].steps.num_steps == 60


def test_what_came_after_it_was_kept_is_read(settings: Settings, read: list[int]) -> None:
    with server(settings) as client:
        seed(client)
        live = look(client)
        assert live is not None
        client.app.state.service.analysis._keep(RUN, live)  # type: ignore[attr-defined]
        live.keeper.num_new = -1_000_000  # it is killed before it keeps more
        count = len(read)
        late = Sender(client, RUN, "late")
        late.send(schema.ErrorRaised(
            attempt=0, rank=0, time_ns=time.time_ns(), type="Late", message="late",
            traceback="",
        ))  # fmt: skip
    with server(settings) as client:
        live = look(client)
        assert live is not None
        assert live.state is not None
        assert len(read) == count
        assert "late" in [error.message for error in live.state._attempts[0].errors]


def test_what_other_code_kept_is_not_read(
    settings: Settings, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(settings) as client:
        seed(client)
        look(client)
        before, first = verdict(client), len(read)
    monkeypatch.setattr(kept, "code_digest", lambda: "another version")
    with server(settings) as client:
        look(client)
        assert len(read) == 2 * first
        assert verdict(client) == before


def test_what_is_damaged_is_not_read(
    settings: Settings, read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with server(settings) as client:
        seed(client)
        look(client)
        before, first = verdict(client), len(read)
    with server(settings) as client:
        state = sa.update(tables.analysis_state).values(data=b"damaged")
        client.app.state.service.writer.run(  # type: ignore[attr-defined]
            lambda unit: unit.connection.execute(state)
        )
        look(client)
        assert len(read) == 2 * first
        assert verdict(client) == before
    assert "what was kept of kept is not read" in caplog.text


def test_what_made_the_analysis_fail_is_not_read(
    settings: Settings, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(settings) as client:
        seed(client)
        live = look(client)
        assert live is not None
        client.app.state.service.analysis._keep(RUN, live)  # type: ignore[attr-defined]
        before, first = verdict(client), len(read)
        with monkeypatch.context() as broken:
            broken.setattr(RunState, "look", lambda *_: 1 / 0)
            look(client)
        look(client)
        assert len(read) == 2 * first
        assert verdict(client) == before


def test_nothing_is_kept_of_a_run_that_is_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(settings) as client:
        seed(client)
        live = look(client)
        assert live is not None
        client.app.state.service.analysis._keep(RUN, live)  # type: ignore[attr-defined]
        assert rows(client, tables.analysis_state) == 1
        ends = [
            schema.RankEnded(attempt=0, rank=rank, time_ns=time.time_ns(), reason="clean")
            for rank in range(live.state._attempts[0].world_size)  # type: ignore[union-attr]
        ]
        Sender(client, RUN, "ends").send(*ends)
        look(client)
        live.last_news -= 3600.0
        look(client)
        assert rows(client, tables.analysis_state) == rows(client, tables.analysis_part) == 0
        monkeypatch.setattr(keeping, "MIN_BATCHES", 64)
    with server(settings) as client:
        assert rows(client, tables.analysis_state) == 0


def test_a_server_that_cannot_write_starts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(settings) as client:
        seed(client)
        look(client)

    def full(unit: Unit) -> None:
        raise StoreUnavailableError("the disk is full", "make room", "disk_full")

    monkeypatch.setattr(loop, "forget_ended", full)
    with server(settings) as client:
        assert look(client) is not None


def test_it_goes_with_its_run(settings: Settings) -> None:
    with server(settings) as client:
        seed(client, ranks=32)
        live = look(client)
        assert live is not None
        service = client.app.state.service  # type: ignore[attr-defined]
        service.analysis._keep(RUN, live)
        assert rows(client, tables.analysis_part) > 0
        ended = sa.update(tables.run).values(status="ended")
        service.writer.run(lambda unit: unit.connection.execute(ended))
        assert client.delete(f"/api/v1/runs/{RUN}?confirm={RUN}").status_code == 200
        service.retention.round()
        assert rows(client, tables.analysis_state) == rows(client, tables.analysis_part) == 0


def test_little_that_is_new_is_not_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MIN_BATCHES", 10_000)
    with server(settings) as client:
        seed(client)
        look(client)
    with server(settings) as client:
        assert rows(client, tables.analysis_state) == 0
