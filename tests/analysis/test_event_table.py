"""The table of operations: each row once, whatever comes, in bounded memory."""

from __future__ import annotations

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import RANK, Column, decode_chunk, encode_chunk, encode_ranks
from rankscope_server.call_shapes import shapes_of
from rankscope_server.observe.collectives import RankCalls, side_by_side
from rankscope_server.observe.event_table import CAPACITY, MAX_BYTES, EventTable


def chunk(steps: range, rows: int, start: int = 0, rank: int = 0) -> dict[str, Column]:
    """Return `rows` all_reduces in each of some steps."""
    count = len(steps) * rows
    columns: dict[str, Column] = {
        name: [""] * count if name in schema.STRING_COLUMNS else np.zeros(count, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns["step"] = np.repeat(np.array(steps), rows)
    columns["arrived_ns"] = start + np.arange(count) * 1000 + rank * 1000
    columns["duration_ns"] = np.full(count, 2_000_000)
    columns["peer_rank"] = np.full(count, -1)
    columns["state"] = np.full(count, schema.ENDED)
    columns["operation"] = ["all_reduce"] * count
    columns["group"] = ["world"] * count
    return columns


def put(table: EventTable, rank: int, *of_chunks: dict[str, Column]) -> None:
    """Give chunks of a rank to a table, as one."""
    packed = [encode_chunk(columns) for columns in of_chunks]
    calls = [
        RankCalls(rank, columns, shapes_of(columns), data)
        for data, columns in zip(packed, of_chunks, strict=True)
    ]
    table.add(calls, side_by_side(calls))


def test_rows_come_back_in_order_each_once() -> None:
    table = EventTable()
    late = chunk(range(5, 9), 3, start=10**9)
    for columns in (late, chunk(range(1, 5), 3), late):
        put(table, 7, columns)
    rows = table.select(np.arange(3, 7))
    assert rows["step"].tolist() == [3] * 3 + [4] * 3 + [5] * 3 + [6] * 3
    assert np.all(np.diff(rows["arrived_ns"]) > 0)
    assert set(rows["duration_ms"].tolist()) == {2.0}
    assert set(rows["rank"].tolist()) == {7}
    assert table.words("operation") == ["all_reduce"]


def test_of_two_words_on_one_operation_the_later_state_counts() -> None:
    table = EventTable()
    still_open = chunk(range(1, 2), 2)
    still_open["state"] = np.full(2, schema.ISSUED)
    still_open["duration_ns"] = np.full(2, -1)
    put(table, 0, chunk(range(1, 2), 2), still_open)
    assert table.select(np.array([1]))["state"].tolist() == [schema.ENDED] * 2


def test_steps_apart_of_each_other_are_those_and_no_others() -> None:
    table = EventTable()
    for begin in range(1, 41, 10):
        put(table, 0, chunk(range(begin, begin + 10), 2, start=begin * 10**9))
    wanted = np.array([3, 17, 18, 40, 41])
    assert np.unique(table.select(wanted)["step"]).tolist() == [3, 17, 18, 40]
    assert table.is_seen(0, wanted).tolist() == [True, True, True, True, False]
    assert not table.is_seen(1, wanted).any()
    assert table.count(wanted) == len(table.select(wanted)["step"]) == 8


def test_what_is_outside_of_steps_is_not_asked_for() -> None:
    table = EventTable()
    put(table, 0, chunk(range(1), 5))
    assert table.num_rows == 0
    put(table, 0, chunk(range(2), 5))
    assert table.select(np.arange(3))["step"].tolist() == [1] * 5
    assert table.count(np.arange(1, 3)) == 5


def test_a_chunk_of_several_ranks_has_the_rows_of_each() -> None:
    table = EventTable()
    of_ranks = {rank: chunk(range(1, 4), 2, rank=rank) for rank in (2, 3, 5)}
    data = encode_ranks(of_ranks)
    columns = decode_chunk(data)
    calls = [RankCalls(np.asarray(columns[RANK]), columns, shapes_of(columns), data)]
    table.add(calls, side_by_side(calls))
    rows = table.select(np.arange(2, 4))
    assert rows["rank"].tolist() == [2] * 4 + [3] * 4 + [5] * 4
    assert rows["step"].tolist() == [2, 2, 3, 3] * 3
    assert [bool(table.is_seen(rank, np.array([3]))[0]) for rank in range(6)] == [
        False, False, True, True, False, True,
    ]  # fmt: skip


def test_memory_is_bounded_and_the_newest_steps_stay() -> None:
    table = EventTable(capacity=10_000)
    for begin in range(1, 400, 10):
        for rank in range(8):
            put(table, rank, chunk(range(begin, begin + 10), 5, rank=rank))
    assert table.num_rows <= 10_000
    newest = table.select(np.arange(391, 401))
    assert len(newest["step"]) == 10 * 8 * 5
    assert table.count(np.arange(391, 401)) == 10 * 8 * 5
    assert table.first_step > 1
    before = table.num_rows
    put(table, 0, chunk(range(1, 11), 5))  # long gone
    assert table.num_rows == before


def test_steps_that_are_gone_in_part_are_gone() -> None:
    table = EventTable(capacity=100)
    for begin in range(1, 31, 10):
        put(table, 0, chunk(range(begin, begin + 10), 4, start=begin * 10**9))
        put(table, 1, chunk(range(begin, begin + 9), 1, start=begin * 10**9))
    every = np.arange(1, 31)
    rows = table.select(every)
    assert rows["step"].min() == table.first_step > 1
    assert table.count(every) == len(rows["step"]) > 0


def test_a_step_larger_than_the_table_does_not_break_it() -> None:
    table = EventTable(capacity=1000)
    for start in range(5):
        put(table, 0, chunk(range(1, 2), 400, start=start * 10**9))
    assert table.num_rows <= 1000
    assert len(table.select(np.array([1]))["step"]) > 0


def test_small_chunks_do_not_fill_memory_either() -> None:
    table = EventTable(max_bytes=100_000)
    for step in range(1, 1001):
        put(table, 0, chunk(range(step, step + 1), 1))
    assert table.num_bytes <= 100_000
    assert table.count(np.arange(990, 1001)) == 11


def test_a_full_table_holds_less_than_a_quarter_of_a_gigabyte() -> None:
    table = EventTable()
    put(table, 0, chunk(range(1, 61), 20))
    assert CAPACITY * table.num_bytes / table.num_rows < 300e6
    assert MAX_BYTES < 300e6
