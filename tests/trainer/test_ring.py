"""The ring and the tree written by hand: their sums, and exactly what each rank sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankscope_trainer.strategies.ring import padded_length, ring_all_reduce
from rankscope_trainer.strategies.tree import children, parent, tree_all_reduce
from tests.trainer.launch import run
from tests.trainer.ring_sums import numbers
from tests.trainer.whole_runs import assert_traffic_as_computed

pytestmark = pytest.mark.core

# how many neighbours each rank has in the tree, as drawn in tree.py
TREES = {2: (1, 1), 3: (2, 1, 1), 4: (2, 1, 2, 1), 6: (3, 1, 2, 1, 2, 1)}
RING_SUMS = Path(__file__).with_name("ring_sums.py")


@pytest.mark.multiproc
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_sums_messages_and_bytes_are_those_of_a_ring_and_of_a_tree(
    num_ranks: int, tmp_path: Path
) -> None:
    finished = run(tmp_path, num_ranks, program=RING_SUMS)
    assert finished.code == 0, finished.output

    by_rank = [torch.load(tmp_path / f"sums-{rank}.pt") for rank in range(num_ranks)]
    exact = sum(numbers(rank, num_ranks, is_whole=True) for rank in range(num_ranks))
    for sums in by_rank:
        assert torch.equal(sums["library True"], exact)
        for name in ("ring", "tree"):
            assert torch.equal(sums[f"{name} True"], exact)
            # Fractions are rounded, and the order of sums is another: only the last bits differ.
            torch.testing.assert_close(
                sums[f"{name} False"], sums["library False"], rtol=1e-5, atol=1e-3
            )
            # the same bits everywhere
            assert torch.equal(sums[f"{name} False"], by_rank[0][f"{name} False"])

    size = exact.nbytes  # type: ignore[union-attr]
    for rank in range(num_ranks):
        by_step = finished.operations(rank)
        for step in (1, 4):
            sent = [num_bytes for operation, num_bytes in by_step[step] if operation == "send"]
            received = [num_bytes for operation, num_bytes in by_step[step] if operation == "recv"]
            assert len(sent) == len(received) == 2 * (num_ranks - 1)
            assert len(by_step[step]) == len(sent) + len(received)  # and nothing else
            assert sum(sent) * num_ranks == sum(received) * num_ranks == 2 * (num_ranks - 1) * size
        assert by_step[2] == by_step[5] == [("all_reduce", size)]
        neighbours = TREES[num_ranks][rank]
        for step in (3, 6):
            assert (
                sorted(by_step[step])
                == [("recv", size)] * neighbours + [("send", size)] * neighbours
            )


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 64, 1000])
def test_a_tree_reaches_every_rank_once_and_soon(num_ranks: int) -> None:
    edges = [(rank, child) for rank in range(num_ranks) for child in children(rank, num_ranks)]
    assert sorted(child for _, child in edges) == list(range(1, num_ranks))
    assert all(parent(child) == rank for rank, child in edges)
    arrived = {0: 0}  # in which step a broadcast reaches a rank
    for rank in range(num_ranks):
        for turn, child in enumerate(reversed(children(rank, num_ranks)), 1):
            arrived[child] = arrived[rank] + turn
    assert max(arrived.values()) == math.ceil(math.log2(num_ranks))


def test_pieces_are_equally_long() -> None:
    assert [padded_length(length, 4) for length in (1, 4, 5, 8)] == [4, 4, 8, 8]


@pytest.mark.parametrize("all_reduce", [ring_all_reduce, tree_all_reduce])
def test_one_rank_sends_nothing(all_reduce: Callable[[torch.Tensor], None]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        flat = torch.arange(5.0)
        all_reduce(flat)
        assert torch.equal(flat, torch.arange(5.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.multiproc
def test_tree_and_library_train_the_same_model(tmp_path: Path) -> None:
    """Two ranks: a sum of two numbers has only one order, so even the last bits are equal."""
    common = ["--strategy", "ring", "--steps", "3"]
    ring = run(tmp_path / "ring", 2, *common)
    for name in ("library", "tree"):
        other = run(tmp_path / name, 2, *common, "--reduce-with", name)
        assert ring.code == other.code == 0, ring.output + other.output
        assert ring.losses() == other.losses()
        assert_traffic_as_computed(other, 2)
