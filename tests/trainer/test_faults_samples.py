"""Mistakes with samples: the same ones on all ranks, the same order in each epoch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rankscope_trainer.data import Batches, ByteWindows
from tests.trainer.launch import run

SMALL = ("--layers", "1", "--width", "16", "--context", "16", "--data-bytes", "2048",
         "--learning-rate", "0")  # fmt: skip

EPOCH = (2048 - 204 - 1) // 16 // 8  # steps: a tenth is for validation, a step takes 2 * 4 windows


def test_ranks_that_forgot_their_part_draw_the_same() -> None:
    windows = ByteWindows(bytes(range(256)), 8)
    first, second = (
        Batches(windows, batch_size=4, shard=shard, num_shards=2, seed=1) for shard in range(2)
    )
    second.slices.sampler.rank = 0
    for (one, _), (other, _) in itertools.islice(zip(first, second, strict=True), 9):
        assert one.equal(other)


@pytest.mark.multiproc
def test_a_sampler_that_is_forgotten_fires_on_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, "--steps", "4", *SMALL, "--fault", "forgotten_sampler:start=1")
    assert ended.code == 0, ended.output
    begun = [line["rank"] for line in ended.manifest() if "start_step" in line]
    assert sorted(begun) == [0, 1]


def test_an_epoch_that_is_not_set_repeats_the_losses_of_the_first(tmp_path: Path) -> None:
    """Of a model that does not learn the loss of a step depends on its batch alone."""
    fault = ("--fault", "forgotten_set_epoch:start=1")
    for name, more in (("with", fault), ("without", ())):
        folder = tmp_path / name
        folder.mkdir()
        ended = run(folder, 1, "--steps", str(2 * EPOCH), *SMALL, *more)
        assert ended.code == 0, ended.output
        losses = list(ended.losses().values())
        assert (losses[:EPOCH] == losses[EPOCH:]) == bool(more)
