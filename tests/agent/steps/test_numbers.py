"""The numbers that are recorded are those that the program computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import rankscope
from rankscope.rank.hooks.numbers.batches import size_of
from rankscope.rank.hooks.numbers.replicas import bits, mixed
from rankscope.rank.step_metrics import SamplingSchedule
from rankscope.wire import formulas, schema
from rankscope.wire.metric_names import METRICS
from tests.agent.steps import programs
from tests.agent.steps.programs import data, loss_of, net
from tests.agent.watching import Watching


def numbers(watching: Watching) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in watching.of(schema.Metrics):
        found.setdefault(record.step, {}).update(record.values)
    return found


def test_loss_rate_and_samples_of_a_plain_loop(watching: Watching) -> None:
    losses = programs.plain(epochs=2)
    seen = numbers(watching)
    assert {step: one["loss"] for step, one in seen.items()} == dict(enumerate(losses, 1))
    assert all(one["learning_rate"] == 1e-2 and one["samples"] == 8 for one in seen.values())
    for step, one in zip(watching.steps, seen.values(), strict=True):
        seconds = (step["ended_ns"] - step["started_ns"]) / 1e9
        assert one["samples_per_second"] == pytest.approx(8 / seconds)
        assert one["loss_nonfinite"] == one["gradient_nonfinite"] == 0
    assert {name for one in seen.values() for name in one} <= {metric.name for metric in METRICS}
    assert seen[2]["parameters"] == sum(one.numel() for one in net().parameters())
    assert seen[2]["parameter_bytes"] == 4 * seen[2]["parameters"]
    num_tensors = len(list(net().parameters()))
    assert seen[2]["optimizer_state_bytes"] == 8 * seen[2]["parameters"] + 4 * num_tensors
    assert seen[1]["rss_peak_bytes"] >= seen[1]["rss_bytes"] * 0.9 > 10 << 20


def test_samples_of_a_loader_that_fetches_one_batch_early(watching: Watching) -> None:
    """As those of Accelerate, which look ahead for the end of the epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        batches = iter(DataLoader(data(), batch_size=8))
        following = next(batches, None)
        while (batch := following) is not None:
            following = next(batches, None)
            loss_of(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [one["samples"] for one in numbers(watching).values()] == [8] * len(watching.steps)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_samples_and_tokens_of_a_model_under_ddp_without_a_loader(
    watching: Watching, alone: None
) -> None:
    model = DistributedDataParallel(torch.nn.Embedding(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(2):
            with torch.no_grad():
                model(torch.zeros(50, 7, dtype=torch.long))
            model(torch.zeros(4, 7, dtype=torch.long)).square().mean().backward()
        optimizer.step()
    seen = numbers(watching)
    assert [(one["samples"], one["tokens"]) for one in seen.values()] == [(8, 56)] * 3
    (used,) = (one for one in watching.of(schema.Event) if one.name == "optimizer")
    assert used.fields["classes"].split() == ["SGD", "Optimizer", "object"]
    assert used.fields["replicas"] == "1"


def test_loss_of_microbatches_is_their_mean(watching: Watching) -> None:
    losses = programs.accumulating(micro=4)
    seen = numbers(watching)
    means = [sum(losses[at : at + 4]) / 4 for at in (0, 4, 8)]
    assert [one["loss"] for one in seen.values()] == pytest.approx(means)
    assert all(one["samples"] == 16 for one in seen.values())


def test_loss_before_the_scaler_and_when_it_is_not_finite(watching: Watching) -> None:
    losses = programs.scaled(bad=2)
    seen = numbers(watching)
    assert [one["loss"] for one in seen.values()] == losses
    assert [one["loss_nonfinite"] for one in seen.values()] == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("clips", [True, False])
def test_gradient_norm_is_before_clipping(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, clips: bool
) -> None:
    monkeypatch.setattr(SamplingSchedule, "wants", lambda self, step: True)
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data(24), batch_size=8):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        norms.append(math.sqrt(sum(float(one.double().square().sum()) for one in gradients)))
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert [one["gradient_norm"] for one in numbers(watching).values()] == pytest.approx(norms)


def test_the_scripts_own_numbers_replace_ours(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(DataLoader(data(24), batch_size=8), 1):
        rankscope.log_metrics(number, loss=100.0 + number)
        loss_of(model, x, y).backward()
        optimizer.step()
    assert [one["loss"] for one in numbers(watching).values()] == [101.0, 102.0, 103.0]


def test_beside_the_scripts_number_stands_our_own_count(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(DataLoader(data(24), batch_size=8), 121):  # it was resumed
        loss_of(model, x, y).backward()
        optimizer.step()
        rankscope.log_metrics(number, custom=1.0)
    told = [one for one in watching.of(schema.Metrics) if "custom" in one.values]
    given = [(one.step, one.counted_step) for one in told if one.counted_step]
    assert given == [(121, 2), (122, 3), (123, 4)]


@pytest.mark.parametrize("watching", [{"peak_flops": 1e9}], indirect=True)
def test_tokens_and_model_flops(watching: Watching) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.table(ids))
            return y

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: list[Any] = [
        {"mask": torch.ones(7, dtype=torch.int64), "input_ids": torch.arange(6)} for _ in range(12)
    ]
    for batch in DataLoader(rows, batch_size=4):
        model(batch["input_ids"]).square().mean().backward()
        optimizer.step()
    seen = numbers(watching)
    assert [one["tokens"] for one in seen.values()] == [24, 24, 24]
    size = seen[2]["parameters"]
    last = seen[3]
    assert "model_flops_per_second" not in seen[1]  # the size was not known yet
    assert last["model_flops_per_second"] == pytest.approx(6 * size * last["tokens_per_second"])
    assert last["mfu_ratio"] == pytest.approx(last["model_flops_per_second"] / 1e9)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 3), (4, 0)),
        ([torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)], (4, 0)),
        ({"x": torch.zeros(2, 5, dtype=torch.int64)}, (2, 10)),
        ({"mask": torch.zeros(2, 9, dtype=torch.int64), "input_ids": torch.zeros(2, 5)}, (2, 10)),
        ({"deep": [{"x": torch.zeros(3)}]}, (3, 0)),
        ("text", None),
        (torch.tensor(1.0), None),
        ([], None),
    ],
)
def test_size_of_a_batch(batch: Any, size: Any) -> None:
    assert size_of(batch) == size


def test_numbers_are_sampled_by_steps_that_ranks_share() -> None:
    cheap, dear = SamplingSchedule(4, 0.001), SamplingSchedule(4, 0.001)
    for schedule, cost_ns in ((cheap, 300_000), (dear, 3_000_000)):
        schedule.spent(10**9, 100_000_000)  # the first one does not count
        schedule.spent(cost_ns, 100_000_000)
    assert (cheap.every, dear.every) == (4, 32)
    assert {step for step in range(1, 257) if dear.wants(step)} <= {
        step for step in range(1, 257) if cheap.wants(step)
    }


def test_default_settings_write_few_records_of_fast_steps(watching: Watching) -> None:
    watching.context.metrics._least_ns = 200_000_000
    for _ in range(10):
        programs.plain(epochs=5)
    spent = sum(step["ended_ns"] - step["started_ns"] for step in watching.steps) / 1e9
    assert len(watching.steps) == 300
    assert 1 <= len(numbers(watching)) <= 12 + spent / 0.2


def test_one_bit_changes_the_checksum() -> None:
    torch.manual_seed(0)
    parameters = [
        torch.randn(33, 7), torch.randn(5).bfloat16(), torch.randn(()), torch.randn(64)[1:60],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]  # fmt: skip

    def value() -> float:
        return mixed(torch.stack([bits(one) for one in parameters]))

    before = value()
    assert before == value() < 2**53
    seen = {before}
    for parameter in parameters:
        flat = parameter.permute(0, 2, 3, 1) if parameter.ndim == 4 else parameter
        raw = flat.reshape(-1).view(torch.uint8)
        raw[-1] ^= 1  # in place where reshape gives a view
        seen.add(value())
    assert len(seen) == 6
    parameters.reverse()
    assert value() not in seen
    assert bits(torch.randn(6, 6)[:, ::2]) is None


def test_flops_of_a_step() -> None:
    assert formulas.training_flops(10, 7) == 420
