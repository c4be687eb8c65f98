"""The ring written by hand: its sums, and exactly what each rank sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankscope_trainer.strategies.ring import padded_length, ring_all_reduce
from tests.trainer.launch import run
from tests.trainer.ring_sums import numbers
from tests.trainer.whole_runs import assert_traffic_as_computed

pytestmark = pytest.mark.core

RING_SUMS = Path(__file__).with_name("ring_sums.py")


@pytest.mark.multiproc
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sums_messages_and_bytes_are_those_of_a_ring(num_ranks: int, tmp_path: Path) -> None:
    finished = run(tmp_path, num_ranks, program=RING_SUMS)
    assert finished.code == 0, finished.output

    by_rank = [torch.load(tmp_path / f"sums-{rank}.pt") for rank in range(num_ranks)]
    exact = sum(numbers(rank, num_ranks, is_whole=True) for rank in range(num_ranks))
    for sums in by_rank:
        assert torch.equal(sums["ring True"], exact)
        assert torch.equal(sums["library True"], exact)
        # Fractions are rounded, and the order of the sums is another: only the last bits differ.
        torch.testing.assert_close(sums["ring False"], sums["library False"], rtol=1e-5, atol=1e-3)
        assert torch.equal(sums["ring False"], by_rank[0]["ring False"])  # the same bits everywhere

    size = exact.nbytes  # type: ignore[union-attr]
    for rank in range(num_ranks):
        by_step = finished.operations(rank)
        for step in (1, 3):
            sent = [num_bytes for operation, num_bytes in by_step[step] if operation == "send"]
            received = [num_bytes for operation, num_bytes in by_step[step] if operation == "recv"]
            assert len(sent) == len(received) == 2 * (num_ranks - 1)
            assert len(by_step[step]) == len(sent) + len(received)  # and nothing else
            assert sum(sent) * num_ranks == sum(received) * num_ranks == 2 * (num_ranks - 1) * size
        assert by_step[2] == by_step[4] == [("all_reduce", size)]


def test_pieces_are_equally_long() -> None:
    assert [padded_length(length, 4) for length in (1, 4, 5, 8)] == [4, 4, 8, 8]


def test_a_ring_of_one_rank_sends_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        flat = torch.arange(5.0)
        ring_all_reduce(flat)
        assert torch.equal(flat, torch.arange(5.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.multiproc
def test_the_library_trains_the_same_model(tmp_path: Path) -> None:
    """Two ranks: a sum of two numbers has only one order, so even the last bits are equal."""
    common = ["--strategy", "ring", "--steps", "3"]
    ring = run(tmp_path / "ring", 2, *common)
    library = run(tmp_path / "library", 2, *common, "--reduce-with", "library")
    assert ring.code == library.code == 0, ring.output + library.output
    assert ring.losses() == library.losses()
    assert_traffic_as_computed(library, 2)
