"""What the agent records of passes over loaders: first batches, sampler, epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from rankscope.rank.hooks.numbers.sampling import checksum
from rankscope.wire import schema
from tests.agent.watching import Watching

DATA = TensorDataset(torch.arange(64.0).reshape(32, 2))


def loader_of(**how: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2, **how)


def epoch_of(loader: DataLoader[Any], step: Callable[[Any], None]) -> None:
    for batch in loader:
        step(batch)


@pytest.fixture
def learn() -> Callable[[Any], None]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        model(batch[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def passes(watching: Watching) -> list[dict[str, str]]:
    return [one.fields for one in watching.of(schema.Event) if one.name == "data pass"]


def test_each_pass_is_recorded_with_the_epoch_of_its_sampler(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    loader = loader_of(sampler=sampler)
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        epoch_of(loader, learn)
    first, same, other = passes(watching)
    assert [one["pass"] for one in (first, same, other)] == ["1", "2", "3"]
    assert first["batches"] == same["batches"] != other["batches"]
    assert len(first["batches"].split()) == 4
    assert (first["sampler"], first["shuffles"]) == ("DistributedSampler", "True")
    assert [one["epoch"] for one in (first, same, other)] == [
        "0 of seed 0", "0 of seed 0", "1 of seed 0",
    ]  # fmt: skip
    assert first["group"] == ""  # no replicas


def test_workers_that_stay_begin_passes_too(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    loader = loader_of(num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    epoch_of(loader, learn)
    epoch_of(loader, learn)
    assert [one["pass"] for one in passes(watching)] == ["1", "2"]


def test_what_is_only_looked_at_is_no_pass(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    """Also in the middle of an epoch, with and without no_grad, of many batches and of two."""
    for _ in loader_of():
        pass
    training = iter(loader_of())
    for number, batch in enumerate(training):
        learn(batch)
        if number == 6:
            with torch.no_grad():
                epoch_of(loader_of(shuffle=True), lambda batch: None)
            few = iter(loader_of())
            next(few), next(few)
    assert [one["loader"] for one in passes(watching)] == ["1"]


def test_one_that_is_fetched_ahead_belongs_to_its_pass(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    batches = iter(loader_of())
    ahead = next(batches)
    for _ in range(8):
        now, ahead = ahead, next(batches)
        learn(now)
    (one,) = passes(watching)
    assert one["batches"].split() == [checksum([DATA[2 * at : 2 * at + 2][0]]) for at in range(4)]


def test_a_stream_has_no_sampler_of_epochs(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.arange(20.0).reshape(10, 2))

    epoch_of(DataLoader(Stream(), batch_size=None), lambda row: learn([row]))
    (one,) = passes(watching)
    assert (one["shuffles"], one["epoch"]) == ("", "")


def test_a_loader_inside_of_a_data_set_is_no_pass_of_its_own(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    class Outer(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for _ in range(6):
                yield next(iter(loader_of()))

    epoch_of(DataLoader(Outer(), batch_size=None), learn)
    (one,) = passes(watching)
    assert one["loader"] == "0"
    assert len(one["batches"].split()) == 4


def test_few_passes_of_few_loaders_are_recorded(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    loader = loader_of()
    for _ in range(7):
        epoch_of(loader, learn)
    assert len(passes(watching)) == 4


def test_a_checksum_is_of_what_a_batch_holds() -> None:
    batch = {"x": torch.arange(6_000).reshape(3, 2_000), "y": torch.tensor([1, 2, 3])}
    assert checksum(batch) == checksum({name: value.clone() for name, value in batch.items()})
    assert checksum(batch) != checksum(batch | {"y": torch.tensor([1, 2, 4])})
    assert checksum([torch.tensor([True, False]), "name"]) != ""
    assert checksum(["name", 3, torch.tensor(1.0), torch.arange(6).reshape(2, 3).t()]) == ""


def test_the_numbers_that_a_script_draws_stay_the_same(
    watching: Watching, learn: Callable[[Any], None]
) -> None:
    torch.manual_seed(3)
    epoch_of(loader_of(shuffle=True), learn)
    seen = torch.rand(3)
    watching.agent.remove_hooks()
    torch.manual_seed(3)
    epoch_of(loader_of(shuffle=True), learn)
    assert torch.equal(seen, torch.rand(3))
