"""Tiles and sums that the writer keeps in memory are those of the store, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.ingest.operations import CallDurations, OperationKey, OperationSum
from rankscope_server.ingest.step_metrics import FLOAT_METRICS, STARTED
from rankscope_server.retention import removal
from rankscope_server.retention.kinds import parts_of_run
from rankscope_server.store import tables, tiles
from rankscope_server.store.engine import open_engines
from rankscope_server.store.operations import committed_sums, sum_of_row
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
    kept = tiles.committed_tiles(most_bytes=10_000)
    for number in range(100):
        kept.put({(RUN, 0, number, 0): {"step": np.zeros((4, 64), np.float32)}})  # 1,024 bytes
    known = [number for number in range(100) if kept.take((RUN, 0, number, 0)) is not None]
    assert known == list(range(91, 100))


# --- sums of collectives ------------------------------------------------------------------------


def summing(durations_ns: list[int], run: str = RUN, size: int = 8) -> Callable[[Unit], None]:
    """Return work that counts all_reduces of one size."""

    def work(unit: Unit) -> None:
        num = len(durations_ns)
        calls = CallDurations(
            [OperationKey("all_reduce", "world", size)], np.zeros(num, np.int64),
            np.array(durations_ns), np.ones(num, np.int64), np.full(num, schema.ENDED),
        )  # fmt: skip
        unit.operations.add(run, 0, calls)

    return work


def summed(engine: sa.Engine, run: str = RUN) -> dict[int, OperationSum]:
    """Return by size what the store has."""
    table = tables.op_rollup
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table).where(table.c.run_id == run))
        return {row.size_bytes: sum_of_row(row) for row in rows}


def test_sums_of_many_small_transactions_are_those_of_all_calls(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    chance = np.random.default_rng(16)
    all_ns: dict[int, list[int]] = {8: [], 16: [], 24: []}
    for _ in range(100):
        size, some = int(chance.choice([8, 16, 24])), chance.integers(1, 10**9, 20).tolist()
        writer.run(summing(some, size=size))
        all_ns[size] += some
    found = summed(engines[1])
    for size, durations in all_ns.items():
        known = found[size]
        assert (known.count, known.sum_ns, known.min_ns, known.max_ns, known.blocked_ns) == (
            len(durations), sum(durations), min(durations), max(durations), len(durations)
        )  # fmt: skip
        assert known.histogram.sum() == len(durations)


def test_of_sums_of_a_transaction_that_fails_nothing_counts(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.run(summing([1]))
    flush = Unit.flush

    def fails(unit: Unit) -> None:
        flush(unit)
        raise RuntimeError("after it was written, before it was committed")

    monkeypatch.setattr(Unit, "flush", fails)
    with pytest.raises(RuntimeError):
        writer.run(summing([10]))
    monkeypatch.undo()
    writer.run(summing([100]))
    assert summed(engines[1])[8].sum_ns == 101


def test_a_run_that_was_deleted_counts_from_nothing(
    writer: Writer, engines: tuple[sa.Engine, sa.Engine]
) -> None:
    writer.run(summing([1]))
    writer.run(summing([1], "other"))
    for _, part in parts_of_run():
        writer.run(lambda unit, part=part: removal.remove_of_run(unit, RUN, part, 100))
    writer.run(summing([10]))
    writer.run(summing([10], "other"))
    assert summed(engines[1])[8].sum_ns == 10
    assert summed(engines[1], "other")[8].sum_ns == 11


def test_memory_of_sums_is_bounded() -> None:
    kept = committed_sums(most_bytes=30_000)
    for size in range(100):
        kept.put({(RUN, 0, OperationKey("all_reduce", "world", size)): OperationSum()})
    known = [
        size for size in range(100)
        if kept.take((RUN, 0, OperationKey("all_reduce", "world", size))) is not None
    ]  # fmt: skip
    assert known == list(range(90, 100))
