"""Which ranks of a node are put into one chunk."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from rankscope.node.columns import MAX_EVENTS_OF_RANKS, RankEvents, chunks_of
from rankscope.wire import schema
from rankscope.wire.chunk import by_rank, decode_chunk


def events(
    rank: int, count: int = 10, kind: schema.ChunkKind = "steps", attempt: int = 0
) -> RankEvents:
    names = schema.STEP_COLUMNS if kind == "steps" else schema.COLLECTIVE_COLUMNS
    numbers = {name: np.arange(count) + rank for name in names}
    words = {name: ["a"] * count for name in names if name in schema.STRING_COLUMNS}
    return RankEvents(kind, attempt, rank, "node-a", {**numbers, **words}, count)


def put(taken: Iterable[RankEvents]) -> list[dict[int, int]]:
    """Return how many events of which rank are in each chunk, after a look at what it says."""
    found = []
    for chunk in chunks_of(taken):
        columns_of = dict(by_rank(chunk.rank, decode_chunk(chunk.data)))
        ranks = {rank: len(columns["step"]) for rank, columns in columns_of.items()}
        assert chunk.rank == min(ranks)
        assert chunk.count == sum(ranks.values())
        for rank, columns in columns_of.items():
            assert list(columns["step"]) == list(np.arange(ranks[rank]) + rank)
        assert chunk.step_lo == min(ranks)
        assert chunk.step_hi == max(rank + count - 1 for rank, count in ranks.items())
        found.append(ranks)
    return found


def test_ranks_of_a_node_are_one_chunk_of_each_kind() -> None:
    taken = [events(rank, kind=kind) for rank in (2, 0, 1) for kind in ("collectives", "steps")]  # type: ignore[arg-type]
    assert put(taken) == [{0: 10, 1: 10, 2: 10}] * 2
    assert [chunk.kind for chunk in chunks_of(taken)] == ["collectives", "steps"]


def test_one_rank_is_a_chunk_as_ever() -> None:
    (chunk,) = chunks_of([events(3)])
    assert chunk.data[:4] == b"RSC2"
    assert chunks_of([]) == []


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([events(63), events(64), events(65)], [{63: 10}, {64: 10, 65: 10}]),
        ([events(1), events(2), events(1, 5)], [{1: 10}, {1: 5, 2: 10}]),
        ([events(1), events(2, attempt=1)], [{1: 10}, {2: 10}]),
        ([events(rank, MAX_EVENTS_OF_RANKS // 2) for rank in range(3)],
         [{0: 8_192, 1: 8_192}, {2: 8_192}]),
    ],
    ids=["of two blocks", "a rank twice", "of two attempts", "many"],
)  # fmt: skip
def test_what_is_not_put_together(taken: list[RankEvents], expected: list[dict[int, int]]) -> None:
    assert put(taken) == expected
