"""What ranks of a chunk called alike is taken once, and leaves what taking each call leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from rankscope.wire.chunk import Column
from rankscope_server.call_shapes import shapes_of
from rankscope_server.observe.alike import alike
from rankscope_server.observe.calls import CallTable
from rankscope_server.observe.collectives import RankCalls, side_by_side
from tests.analysis.collective_columns import columns_of

PER_STEP = 5
RANKS = 4


def columns_of_rank(rank: int, begin: int, end: int) -> dict[str, Column]:
    """Return calls `begin` to `end` (from 0) of a rank: of five in a step two within its pair."""
    numbers = np.arange(begin, end)
    step, place = divmod(numbers, PER_STEP)
    is_pair = place >= 3
    columns = columns_of(numbers * 10.0 + rank, numbers * 10.0 + 8)
    sequence = np.where(is_pair, step * 2 + place - 3, step * 3 + place) + 1
    return columns | {
        "step": step + 1, "sequence": sequence,
        "size_bytes": 4096 * (1 + place),
        "group": [f"pair{rank // 2}" if one else "world" for one in is_pair.tolist()],
        "call_site": [f"train.py:{one}" for one in place.tolist()],
    }  # fmt: skip


def chunk_of(edges: Sequence[tuple[int, int]], change: Any = None) -> RankCalls:
    """Return a chunk of four ranks, from where to where each of them made calls."""
    parts = [columns_of_rank(rank, *edge) for rank, edge in enumerate(edges)]
    if change is not None:
        change(parts)
    columns: dict[str, Column] = {}
    for name in parts[0]:
        cells = [part[name] for part in parts]
        is_words = isinstance(cells[0], list)
        columns[name] = list(chain(*cells)) if is_words else np.concatenate(cells)
    ranks = np.repeat(np.arange(RANKS), [end - begin for begin, end in edges])
    return RankCalls(ranks, columns, shapes_of(columns))


def known_of(table: CallTable) -> dict[str, Any]:
    """Return everything that a table says."""
    said = {}
    for name, track in table.tracks.items():
        numbers = range(1, track.newest + 1)
        said[name] = {
            "odd": track.odd, "first": track.first, "sites": track.sites,
            "newest": track.newest, "broken": track.broken, "given up": track.given_up,
            "agreed": track.num_agreed, "open": track.num_open, "last": track.last_agreed,
            "rows": [
                {rank: table.calls[code] for rank, code in track.row(number).items()}
                for number in numbers
            ],
            "usual": [
                None if (code := track.usual(number, 0b1111)) is None else table.calls[code]
                for number in numbers
            ],
        }  # fmt: skip
    return said | {"taken": table.num_taken}


def table_of() -> CallTable:
    table = CallTable()
    table.define("world", RANKS)
    table.define("pair0", 2)
    table.define("pair1", 2)
    return table


def world_only(parts: list[dict[str, Any]]) -> None:
    for part in parts:
        part["group"] = [ONE_GROUP] * len(part["group"])
        part["sequence"] = (np.asarray(part["step"]) - 1) * PER_STEP + np.asarray(
            [int(site.rpartition(":")[2]) for site in part["call_site"]]
        ) + 1  # fmt: skip


def changing(rank: int, at: int, name: str, value: object) -> Any:
    def change(parts: list[dict[str, Any]]) -> None:
        column = parts[rank][name]
        if not isinstance(column, list):
            column = parts[rank][name] = column.copy()
        column[at] = value

    return change


WHOLE = [(0, 100)] * RANKS
RAGGED = [(3, 98), (0, 100), (4, 97), (2, 100)]
ONE_GROUP = "world"


@pytest.mark.parametrize(
    ("edges", "change"),
    [
        (WHOLE, None),
        (RAGGED, None),
        (WHOLE, changing(2, 41, "size_bytes", 12)),  # another size in one call of a rank
        (RAGGED, changing(2, 41, "size_bytes", 12)),
        (RAGGED, changing(1, 50, "call_site", "extra.py:1")),
        (WHOLE, changing(0, 99, "operation", "broadcast")),
        ([(0, 100), (0, 100), (0, 100), (0, 0)], None),  # a rank that made none
        ([(0, 40), (60, 100), (0, 100), (0, 100)], None),
    ],
)
def test_a_table_knows_the_same(edges: list[tuple[int, int]], change: Any) -> None:
    for also in (world_only, lambda parts: None):

        def both(parts: list[dict[str, Any]], also: Any = also) -> None:
            also(parts)
            if change is not None:
                change(parts)

        chunk = chunk_of(edges, both)
        together, apart = table_of(), table_of()
        together.add(side_by_side([chunk]), alike([chunk]))
        apart.add(side_by_side([chunk]))
        assert known_of(together) == known_of(apart)


@pytest.mark.parametrize(("edges", "num"), [(WHOLE, 100), (RAGGED, 90)])
def test_one_event_stands_for_those_of_all_ranks(edges: list[tuple[int, int]], num: int) -> None:
    chunk = chunk_of(edges, world_only)
    found = alike([chunk, chunk])
    assert found is not None
    sizes = found.callers.sizes[found.of]
    assert int((sizes == RANKS).sum()) == 2 * num
    assert int(sizes.sum()) == 2 * len(np.asarray(chunk.rank))
    together, apart = table_of(), table_of()
    together.add(side_by_side([chunk, chunk]), found)
    apart.add(side_by_side([chunk, chunk]))
    assert known_of(together) == known_of(apart)


def test_a_call_that_differs_is_known_with_its_own_time() -> None:
    for edges in (WHOLE, RAGGED):

        def change(parts: list[dict[str, Any]]) -> None:
            world_only(parts)
            for part in parts[2:]:  # two ranks of four, from one call on
                part["size_bytes"] = np.where(
                    np.asarray(part["sequence"]) > 50, 8, part["size_bytes"]
                )

        chunk = chunk_of(edges, change)
        first = chunk_of(edges, world_only)
        tables = []
        for known in (None, alike([chunk])):
            table = table_of()
            table.add(side_by_side([first]), alike([first]))
            table.add(side_by_side([chunk]), known)
            tables.append(known_of(table))
        assert tables[0] == tables[1]


def test_calls_that_hardly_any_ranks_share_are_taken_each_for_itself() -> None:
    def change(parts: list[dict[str, Any]]) -> None:
        for rank, part in enumerate(parts):
            part["size_bytes"] = np.full(len(part["size_bytes"]), 10 + rank)

    assert alike([chunk_of(WHOLE, change)]) is None
