"""Tiles that the writer keeps in memory are those of the store, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rankscope_server.ingest.step_metrics import FLOAT_METRICS, STARTED
from rankscope_server.retention import removal
from rankscope_server.retention.kinds import parts_of_run
from rankscope_server.store import tiles
from rankscope_server.store.engine import open_engines
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

RUN = "run"


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    found = open_engines(f"sqlite:///{tmp_path / 'rankscope.db'}", "normal")
    yield found
    for engine in found:
        engine.dispose()


@pytest.fixture
def writer(engines: tuple[sa.Engine, sa.Engine]) -> Iterator[Writer]:
    found = Writer(engines[0])
    found.start()
    yield found
    found.close()


def adding(ranks: Any, steps: Any, value: float, run: str = RUN) -> Callable[[Unit], None]:
    """Return work that writes one value into some cells of all metrics."""

    def work(unit: Unit) -> None:
        cells = np.full(len(steps), value)
        values = {name: cells for name in FLOAT_METRICS} | {STARTED: cells.astype(np.int64)}
        unit.tiles.add(run, 0, np.asarray(ranks), np.asarray(steps), values)

    return work


def stored(engine: sa.Engine, metric: str = "step", run: str = RUN) -> np.ndarray[Any, Any]:
    """Return the cells of the first 128 steps of 130 ranks as the store has them."""
    plane = np.full((130, 128), np.nan)
    with engine.connect() as connection:
        for first, found in tiles.read_blocks(connection, run, (metric,), 0, 127):
            part = found[metric]
            plane[: len(part), first : first + part.shape[1]] = part
    return plane


def test_many_small_transactions_leave_what_one_array_would(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    chance, wanted = np.random.default_rng(16), np.full((130, 128), np.nan)
    for number in range(200):
        ranks, steps = chance.integers(0, 130, 40), chance.integers(0, 128, 40)
        writer.run(adding(ranks, steps, float(number + 1)))
        wanted[ranks, steps] = number + 1
    assert np.array_equal(stored(engines[1]), wanted, equal_nan=True)


def test_a_transaction_that_fails_leaves_nothing_behind(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.run(adding([0], [1], 1.0))
    flush = Unit.flush

    def fails(unit: Unit) -> None:
        flush(unit)
        raise RuntimeError("after it was written, before it was committed")

    monkeypatch.setattr(Unit, "flush", fails)
    with pytest.raises(RuntimeError):
        writer.run(adding([0], [2], 2.0))
    monkeypatch.undo()
    writer.run(adding([0], [3], 3.0))
    assert stored(engines[1])[0, :4].tolist() == pytest.approx([np.nan, 1, np.nan, 3], nan_ok=True)


def test_a_run_that_was_deleted_begins_with_empty_tiles(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    writer.run(adding([0], [1], 1.0))
    writer.run(adding([0], [1], 1.0, "other"))
    for _, part in parts_of_run():
        writer.run(lambda unit, part=part: removal.remove_of_run(unit, RUN, part, 100))
    writer.run(adding([0], [2], 2.0))
    writer.run(adding([0], [2], 2.0, "other"))
    assert np.isnan(stored(engines[1])[0, 1])
    assert stored(engines[1], run="other")[0, 1:3].tolist() == [1, 2]


def test_jobs_of_a_failed_group_are_repeated_with_the_tiles_of_the_store(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    writer.run(adding([0], [1], 1.0))

    def fails(unit: Unit) -> None:
        raise RuntimeError("this job only")

    jobs: list[Future[None]] = []
    started = writer.submit(lambda unit: jobs.extend(  # both wait while this one runs
        [writer.submit(adding([0], [2], 2.0)), writer.submit(fails)]
    ))  # fmt: skip
    started.result(10)
    jobs[0].result(10)
    with pytest.raises(RuntimeError):
        jobs[1].result(10)
    writer.run(adding([0], [3], 3.0))
    assert stored(engines[1])[0, 1:4].tolist() == [1, 2, 3]


def test_memory_of_tiles_is_bounded() -> None:
    kept = tiles.CommittedTiles(most_bytes=10_000)
    for number in range(100):
        kept.put({(RUN, 0, number, 0): {"step": np.zeros((4, 64), np.float32)}})  # 1,024 bytes
    known = [number for number in range(100) if kept.take((RUN, 0, number, 0)) is not None]
    assert known == list(range(91, 100))
