from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.observe.collectives import Collectives
from rankscope_server.observe.event_table import CAPACITY, EventTable


def chunk(steps: range, rows: int, start: int = 0, rank: int = 0) -> dict[str, Column]:
    """Return `rows` all_reduces in each of some steps."""
    count = len(steps) * rows
    columns: dict[str, Column] = {
        name: [""] * count if name in schema.STRING_COLUMNS else np.zeros(count, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns["step"] = np.repeat(np.array(steps), rows)
    columns["arrived_ns"] = start + np.arange(count) * 1000 + rank
    columns["duration_ns"] = np.full(count, 2_000_000)
    columns["peer_rank"] = np.full(count, -1)
    columns["state"] = np.full(count, schema.ENDED)
    columns["operation"] = ["all_reduce"] * count
    columns["group"] = ["world"] * count
    return columns


def test_rows_come_back_in_order_each_once() -> None:
    table = EventTable()
    late = chunk(range(5, 9), 3, start=10**9)
    for columns in (late, chunk(range(1, 5), 3), late):
        table.add(Collectives.of(7, columns))
    rows = table.select(np.arange(3, 7))
    assert rows["step"].tolist() == [3] * 3 + [4] * 3 + [5] * 3 + [6] * 3
    assert np.all(np.diff(rows["arrived_ns"]) > 0)
    assert set(rows["duration_ms"].tolist()) == {2.0}
    assert table.words("operation") == ["all_reduce"]


def test_of_two_words_on_one_operation_the_later_state_counts() -> None:
    table = EventTable()
    still_open = chunk(range(1, 2), 2)
    still_open["state"] = np.full(2, schema.ISSUED)
    still_open["duration_ns"] = np.full(2, -1)
    for columns in (chunk(range(1, 2), 2), still_open):
        table.add(Collectives.of(0, columns))
    assert table.select(np.array([1]))["state"].tolist() == [schema.ENDED] * 2


def test_memory_is_bounded_and_the_newest_steps_stay() -> None:
    table = EventTable(capacity=10_000)
    for begin in range(1, 400, 10):
        for rank in range(8):
            table.add(Collectives.of(rank, chunk(range(begin, begin + 10), 5, rank=rank)))
    assert table.num_rows <= 10_000
    newest = table.select(np.arange(391, 401))
    assert len(newest["step"]) == 10 * 8 * 5
    assert table.count(np.arange(391, 401)) == 10 * 8 * 5
    assert table.first_step > 1
    before = table.num_rows
    table.add(Collectives.of(0, chunk(range(1, 11), 5)))  # long gone
    assert table.num_rows == before


def test_a_step_larger_than_the_table_does_not_break_it() -> None:
    table = EventTable(capacity=1000)
    for start in range(5):
        table.add(Collectives.of(0, chunk(range(1, 2), 400, start=start * 10**9)))
    assert table.num_rows <= 1000


def test_the_full_table_holds_a_quarter_of_a_gigabyte() -> None:
    table = EventTable()
    row_bytes = table.num_bytes / 4096
    assert CAPACITY * row_bytes < 300e6
