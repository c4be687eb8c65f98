"""Whole runs on several ranks: the losses are right, resuming is exact, traffic is as computed."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings, load_settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message
from tests.trainer.launch import Finished, run

STEPS = 10
HALFWAY = 5
DDP_RANKS = 3  # the sum of two numbers does not depend on their order, that of three does
PIPELINE_RANKS = 2
SHARDED = {"ddp", "ring"}  # each rank draws its own part of the data
RUNS: dict[str, tuple[int, str]] = {
    "ddp": (DDP_RANKS, "--microbatches 2 --bucket-mib 0.05"),
    "gpipe": (
        PIPELINE_RANKS,
        "--strategy pipeline --schedule gpipe --microbatches 3"
        " --validate-every 4 --validate-batches 2",
    ),
    "1f1b": (PIPELINE_RANKS, "--strategy pipeline --microbatches 4 --clip 0.5"),
    "ring": (DDP_RANKS, "--strategy ring"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name, ranks, *_arguments(folder / name, name))
        for name, (ranks, _) in RUNS.items()
    }


def _arguments(folder: Path, name: str) -> list[str]:
    checkpoints = ["--checkpoint-dir", str(folder / "checkpoints")]
    checkpoints += ["--checkpoint-every", str(HALFWAY)]
    return [*RUNS[name][1].split(), *checkpoints, "--steps", str(STEPS), "--log-every", "5"]


def reference_losses(
    settings: Settings, ranks: int, num_shards: int | None = None
) -> dict[int, float]:
    """Train in this process, one microbatch after the other; return what rank 0 would report."""
    text = read_standard_library(settings.data_bytes)
    windows = ByteWindows(split_text(text, settings.validation_ratio)[0], settings.context)
    if num_shards is None:
        num_shards = ranks if settings.strategy in SHARDED else 1
    microbatches = settings.microbatches_for(ranks)
    shards = [
        iter(
            Batches(
                windows,
                batch_size=settings.batch_size * microbatches,
                shard=shard,
                num_shards=num_shards,
                seed=settings.seed,
            )
        )
        for shard in range(num_shards)
    ]
    model = build_model(settings)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    losses: dict[int, float] = {}
    for step in range(1, settings.steps + 1):
        for shard, batches in enumerate(shards):
            inputs, targets = next(batches)
            loss = next_byte_loss(model(inputs), targets)
            (loss / num_shards).backward()
            if shard == 0:
                losses[step] = loss.item()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    finished, ranks = runs[name], RUNS[name][0]
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    settings = load_settings(finished.arguments, {}, ranks)
    expected = reference_losses(settings, ranks)
    # The same numbers are added up in another order; nothing else may differ.
    assert finished.losses() == pytest.approx(expected, rel=2e-5)
    assert finished.losses()[STEPS] < finished.losses()[1] - 0.3


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    finished, ranks = runs[name], RUNS[name][0]
    settings = load_settings(finished.arguments, {}, ranks)
    for rank in range(ranks):
        assert _counted(finished, rank) == expected_traffic(settings, rank=rank, world_size=ranks)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["ddp", "1f1b", "ring"])
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    original, ranks = runs[name], RUNS[name][0]
    checkpoint = f"step-{HALFWAY:08d}"
    shutil.copytree(
        original.folder / "checkpoints" / checkpoint, tmp_path / "checkpoints" / checkpoint
    )
    resumed = run(tmp_path, ranks, *_arguments(tmp_path, name))

    assert resumed.code == 0, resumed.output
    expected = {step: loss for step, loss in original.losses().items() if step > HALFWAY}
    assert resumed.losses() == expected  # exactly
    settings = load_settings(resumed.arguments, {}, ranks)
    for rank in range(ranks):
        last = Path("checkpoints", f"step-{STEPS:08d}", f"rank-{rank}.pt")
        parts = [torch.load(run.folder / last, weights_only=True) for run in (original, resumed)]
        assert_equal(*parts)
        assert _counted(resumed, rank) == expected_traffic(
            settings, rank=rank, world_size=ranks, resumed_after=HALFWAY
        )


@pytest.mark.multiproc
def test_validation_is_logged_where_the_loss_is_known(runs: dict[str, Finished]) -> None:
    lines = [line for line in runs["gpipe"].output.splitlines() if "validation loss" in line]
    assert ["rank 1" in line for line in lines] == [True, True], lines
    assert [line.partition("step ")[2].split()[0] for line in lines] == ["4", "8"]


def _counted(finished: Finished, rank: int) -> dict[int, Counter[Message]]:
    by_step = finished.operations(rank)
    return {
        step: Counter(Message(*operation) for operation in by_step.get(step, []))
        for step in {0, *by_step}
    }


def assert_equal(one: object, other: object) -> None:
    """Compare nested containers of tensors, bit for bit."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert one == other
