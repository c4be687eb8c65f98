"""Periodic averaging: what it computes, when it is data parallel after all, and how it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.traffic.message import Message
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
    batches_of_shards,
    counted_traffic,
)

RANKS = 3
STEPS = 8
HALFWAY = 4  # one step after an average
PLAIN_SGD = ["--optimizer", "sgd", "--learning-rate", "0.3", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("averaging")
    averaging = "--strategy local_sgd --average-every 3"
    arguments = with_checkpoints(folder, averaging, steps=STEPS, every=HALFWAY)
    finished = run(folder, RANKS, *arguments)
    assert finished.code == 0, finished.output
    return finished


def losses_of_one_process(settings: Settings, *, averages_gradients: bool) -> dict[int, float]:
    """Train all replicas in this process; return the losses of the first."""
    shards = [iter(batches) for batches in batches_of_shards(settings, RANKS, RANKS)]
    replicas = [build_model(settings) for _ in range(RANKS)]
    optimizers = [build_optimizer(settings, replica) for replica in replicas]
    losses: dict[int, float] = {}
    for step in range(1, settings.steps + 1):
        for rank, replica in enumerate(replicas):
            inputs, targets = next(shards[rank])
            loss = next_byte_loss(replica(inputs), targets)
            loss.backward()
            if rank == 0:
                losses[step] = loss.item()
        if averages_gradients:
            _average([[p.grad for p in replica.parameters()] for replica in replicas])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not averages_gradients and step % settings.average_every == 0:
            _average([[p.data for p in replica.parameters()] for replica in replicas])
    return losses


def _average(replicas: list[list[torch.Tensor | None]]) -> None:
    for same in zip(*replicas, strict=True):
        tensors = [tensor for tensor in same if tensor is not None]
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


@pytest.mark.multiproc
def test_it_computes_what_one_process_computes_for_all_replicas(averaging: Finished) -> None:
    settings = load_settings(averaging.arguments, {}, RANKS)
    expected = losses_of_one_process(settings, averages_gradients=False)
    assert averaging.losses() == pytest.approx(expected, rel=2e-5)  # only sums are ordered anew
    assert averaging.losses()[STEPS] < averaging.losses()[1] - 0.3
    # AdamW, and weights that drift apart: this is not data parallel, nor close to it.
    data_parallel = losses_of_one_process(settings, averages_gradients=True)
    assert averaging.losses() != pytest.approx(data_parallel, rel=1e-3)


@pytest.mark.multiproc
def test_averaging_each_step_of_plain_sgd_is_data_parallel(tmp_path: Path) -> None:
    finished = run(tmp_path, RANKS, "--strategy", "local_sgd", "--average-every", "1", *PLAIN_SGD)
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    settings = load_settings(finished.arguments, {}, RANKS)
    data_parallel = losses_of_one_process(settings, averages_gradients=True)
    assert finished.losses() == pytest.approx(data_parallel, rel=2e-5)
    assert finished.losses()[STEPS] < finished.losses()[1] - 0.3


@pytest.mark.multiproc
def test_weights_travel_only_with_an_average(averaging: Finished) -> None:
    settings = load_settings(averaging.arguments, {}, RANKS)
    size = sum(parameter.nbytes for parameter in build_model(settings).parameters())
    assert_traffic_as_computed(averaging, RANKS)
    for rank in range(RANKS):
        traffic = counted_traffic(averaging, rank, settings)
        assert [step for step in traffic if traffic[step][Message("all_reduce", size)]] == [3, 6]


@pytest.mark.multiproc
def test_a_run_resumed_between_two_averages_goes_on_bit_for_bit(
    averaging: Finished, tmp_path: Path
) -> None:
    resumed = assert_resumes_bit_for_bit(averaging, RANKS, tmp_path, after=HALFWAY)
    part = resumed.folder / "checkpoints" / f"step-{STEPS:08d}" / "rank-1.pt"
    assert torch.load(part, weights_only=True)["strategy"] == {"updates": 2}
