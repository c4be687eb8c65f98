from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from rankscope_trainer.data import (
    Batches,
    ByteWindows,
    checksum,
    read_standard_library,
    split_text,
)
from rankscope_trainer.errors import SettingError

TEXT = bytes(itertools.islice(itertools.cycle(range(251)), 901))


def _batches(shard: int = 0, num_shards: int = 1, batch_size: int = 4) -> Batches:
    windows = ByteWindows(TEXT, context=10)
    return Batches(windows, batch_size=batch_size, shard=shard, num_shards=num_shards, seed=5)


def _take(batches: Batches, count: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in itertools.islice(batches, count)]


def test_the_text_is_the_standard_library_up_to_the_cap() -> None:
    text = read_standard_library(300_000)
    assert len(text) == 300_000
    assert text == read_standard_library(400_000)[:300_000]
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert text.startswith(first.read_bytes())


def test_training_and_validation_share_nothing() -> None:
    training, validation = split_text(TEXT, 0.25)
    assert training + validation == TEXT
    assert len(validation) == 225


def test_targets_are_the_next_bytes() -> None:
    windows = ByteWindows(TEXT, context=10)
    assert len(windows) == 90
    inputs, targets = windows[89]
    assert bytes(inputs.tolist()) == TEXT[890:900]
    assert bytes(targets.tolist()) == TEXT[891:901]


def test_shards_of_an_epoch_are_disjoint() -> None:
    seen = [tuple(window.tolist())
            for shard in range(3)
            for batch in _take(_batches(shard, 3), 7)
            for window in batch]  # fmt: skip
    assert len(seen) == len(set(seen)) == 3 * 7 * 4


def test_epochs_are_shuffled_anew() -> None:
    both = _take(_batches(batch_size=30), 6)
    assert not torch.equal(torch.cat(both[:3]), torch.cat(both[3:]))
    assert sorted(torch.cat(both[:3]).tolist()) == sorted(torch.cat(both[3:]).tolist())


@pytest.mark.parametrize("drawn", [0, 1, 21, 22, 23, 50])
def test_going_on_from_a_position_gives_the_same_batches(drawn: int) -> None:
    batches = _batches()
    expected = _take(batches, drawn)
    resumed = _batches()
    resumed.position = batches.position
    expected = _take(batches, 60 - drawn)  # an epoch has 22 batches
    for one, other in zip(expected, _take(resumed, 60 - drawn), strict=True):
        assert torch.equal(one, other)
    assert resumed.position == batches.position == 2 * 90 + 16 * 4


def _slices(sizes: list[int], steps: int, position: int = 0) -> tuple[list[list[int]], int]:
    """Return what all shards together draw in each step, and where they stand then."""
    shards = [
        Batches(
            ByteWindows(TEXT, context=10),
            batch_size=sizes, shard=shard, num_shards=len(sizes), seed=5,
        )
        for shard in range(len(sizes))
    ]  # fmt: skip
    for batches in shards:
        batches.position = position
    drawn = [_take(batches, steps) for batches in shards]
    slices = [torch.cat(parts).tolist() for parts in zip(*drawn, strict=True)]
    (end,) = {batches.position for batches in shards}
    return slices, end


def test_the_number_of_ranks_does_not_change_what_a_step_draws() -> None:
    expected, end = _slices([12], 10)
    before, middle = _slices([4, 4, 4], 4)
    after, end_after = _slices([8, 4], 6, middle)
    assert [sorted(step) for step in before + after] == [sorted(step) for step in expected]
    assert end == end_after
    assert middle == 4 * 12


def test_another_global_batch_leaves_nothing_out_and_draws_nothing_twice() -> None:
    before, middle = _slices([4, 4, 4], 4)
    after, _ = _slices([4, 4], 5, middle)
    whole, _ = _slices([1], 88)
    order = [one for (one,) in whole]
    for step in before + after:
        assert sorted(step) == sorted(order[: len(step)])
        del order[: len(step)]
    assert not order


@pytest.mark.parametrize(("sizes", "replicas"), [([4, 4, 4], 3), ([8, 4], 3), ([6, 6], 2)])
def test_each_shard_draws_what_a_distributed_sampler_deals_to_it(
    sizes: list[int], replicas: int
) -> None:
    windows = ByteWindows(TEXT, context=10)
    part, first = sum(sizes) // replicas, 0
    for shard, size in enumerate(sizes):
        batches = Batches(windows, batch_size=sizes, shard=shard, num_shards=len(sizes), seed=5)
        expected: list[list[int]] = [[] for _ in range(2 * (len(windows) // sum(sizes)))]
        for rank in range(first, first + size // part):
            sampler = DistributedSampler(windows, replicas, rank, seed=5)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                own = list(sampler)
                for step in range(len(expected) // 2):
                    drawn = own[step * part : (step + 1) * part]
                    expected[epoch * len(expected) // 2 + step] += drawn
        first += size // part
        for indices, inputs in zip(expected, _take(batches, len(expected)), strict=True):
            assert torch.equal(inputs, torch.stack([windows[index][0] for index in indices]))


def test_workers_draw_the_same_batches_also_from_elsewhere() -> None:
    windows = ByteWindows(TEXT, context=10)
    sums = [checksum(*windows[index]) for index in range(len(windows))]
    loaded = Batches(windows, batch_size=4, seed=5, num_workers=2, checksums=sums)
    for drawn in (30, 7):  # an epoch has 22 batches; the second go begins inside of the first one
        expected = _batches()
        expected.position = loaded.position = 8
        pairs = zip(_take(expected, drawn), loaded, strict=False)
        for one, batch in pairs:
            assert torch.equal(one, batch[0])
            assert loaded.corrupt(batch) == []
            assert len(loaded.corrupt((batch[0] + 1, batch[1]))) == 4
        assert loaded.position == expected.position


def test_loading_leaves_the_random_numbers_of_training_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    _take(_batches(), 30)
    assert torch.equal(before, torch.get_rng_state())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(SettingError, match="data_bytes"):
        _batches(num_shards=50)
