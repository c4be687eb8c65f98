"""Periodic averaging: what it computes, when it is data parallel after all, and how it resumes."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings, load_settings
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message
from tests.trainer.launch import Finished, run

RANKS = 3
STEPS = 8
HALFWAY = 4  # one step after an average
AVERAGING = ["--strategy", "local_sgd", "--average-every", "3", "--steps", str(STEPS)]
PLAIN_SGD = ["--optimizer", "sgd", "--learning-rate", "0.3", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("averaging")
    finished = run(folder, RANKS, *AVERAGING, *_checkpoints(folder))
    assert finished.code == 0, finished.output
    return finished


def _checkpoints(folder: Path) -> list[str]:
    every = ["--checkpoint-every", str(HALFWAY)]
    return ["--checkpoint-dir", str(folder / "checkpoints"), *every]


def losses_of_one_process(settings: Settings, *, averages_gradients: bool) -> dict[int, float]:
    """Train all replicas in this process; return the losses of the first."""
    text = read_standard_library(settings.data_bytes)
    windows = ByteWindows(split_text(text, settings.validation_ratio)[0], settings.context)
    size = settings.batch_size * settings.microbatches_for(RANKS)
    shards = [
        iter(Batches(windows, batch_size=size, shard=rank, num_shards=RANKS, seed=settings.seed))
        for rank in range(RANKS)
    ]
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
    for rank in range(RANKS):
        counted = _counted(averaging, rank)
        assert counted == expected_traffic(settings, rank=rank, world_size=RANKS)
        reductions = {
            step: traffic[Message("all_reduce", size)] for step, traffic in counted.items()
        }
        assert [step for step, count in reductions.items() if count] == [3, 6]


@pytest.mark.multiproc
def test_a_run_resumed_between_two_averages_goes_on_bit_for_bit(
    averaging: Finished, tmp_path: Path
) -> None:
    name = f"step-{HALFWAY:08d}"
    shutil.copytree(averaging.folder / "checkpoints" / name, tmp_path / "checkpoints" / name)
    resumed = run(tmp_path, RANKS, *AVERAGING, *_checkpoints(tmp_path))
    assert resumed.code == 0, resumed.output
    later = {step: loss for step, loss in averaging.losses().items() if step > HALFWAY}
    assert resumed.losses() == later
    settings = load_settings(resumed.arguments, {}, RANKS)
    last = Path("checkpoints", f"step-{STEPS:08d}")
    for rank in range(RANKS):
        parts = [
            torch.load(one.folder / last / f"rank-{rank}.pt", weights_only=True)
            for one in (averaging, resumed)
        ]
        for key, value in parts[0]["model"].items():
            assert torch.equal(value, parts[1]["model"][key])
        assert parts[0]["strategy"] == parts[1]["strategy"] == {"updates": 2}
        assert _counted(resumed, rank) == expected_traffic(
            settings, rank=rank, world_size=RANKS, resumed_after=HALFWAY
        )


def _counted(finished: Finished, rank: int) -> dict[int, Counter[Message]]:
    """Return what really was sent, also for the steps in which nothing was."""
    by_step = finished.operations(rank)
    steps = {0, *finished.losses(), *by_step}
    return {
        step: Counter(Message(*operation) for operation in by_step.get(step, []))
        for step in sorted(steps)
    }
