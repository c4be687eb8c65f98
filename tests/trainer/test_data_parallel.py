"""DDP's options: compressed gradients, a static graph, and ranks that run out of batches."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings, load_settings
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message
from rankscope_trainer.strategies.uneven import last_steps
from tests.trainer.launch import Finished, run

STEPS = 10
HALFWAY = 5
COMMON = ["--bucket-mib", "0.05", "--steps", str(STEPS)]
RANKS = {
    "fp16": 2, "bf16": 2, "powersgd": 3, "static": 2, "uneven": 3, "buffers": 2,
    "static-buffers": 2, "uneven-buffers": 3,
}  # fmt: skip
RUNS = {
    "fp16": ["--comm-hook", "fp16"],
    "bf16": ["--comm-hook", "bf16"],
    "powersgd": ["--comm-hook", "powersgd"],
    "static": ["--static-graph"],
    "uneven": ["--uneven-ratio", "0.4"],
    "buffers": ["--mask-buffer"],
    "static-buffers": ["--static-graph", "--mask-buffer"],
    "uneven-buffers": ["--uneven-ratio", "0.4", "--mask-buffer"],
}
# Relative; where nothing but the order of sums differs, the last bits do.
TOLERANCES = {"fp16": 1e-4, "bf16": 1e-3, "static": 2e-5, "uneven": 2e-5, "buffers": 2e-5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("ddp")
    return {name: _run(folder / name, name) for name in RUNS}


def _run(folder: Path, name: str) -> Finished:
    checkpoints = ["--checkpoint-dir", str(folder / "checkpoints")]
    checkpoints += ["--checkpoint-every", str(HALFWAY)]
    return run(folder, RANKS[name], *COMMON, *RUNS[name], *checkpoints)


def losses_of_one_process(settings: Settings, ranks: int) -> dict[int, float]:
    """Train in this process on the shards of those ranks that still have batches."""
    text = read_standard_library(settings.data_bytes)
    windows = ByteWindows(split_text(text, settings.validation_ratio)[0], settings.context)
    size = settings.batch_size * settings.microbatches_for(ranks)
    shards = [
        iter(Batches(windows, batch_size=size, shard=rank, num_shards=ranks, seed=settings.seed))
        for rank in range(ranks)
    ]
    model = build_model(settings)
    optimizer = build_optimizer(settings, model)
    losses: dict[int, float] = {}
    for step in range(1, settings.steps + 1):
        last = last_steps(settings, ranks)
        present = [shard for rank, shard in enumerate(shards) if step <= last[rank]]
        for shard in present:
            inputs, targets = next(shard)
            loss = next_byte_loss(model(inputs), targets)
            (loss / len(present)).backward()
            if shard is shards[0]:
                losses[step] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_the_loss_is_that_of_a_single_process_or_falls(
    runs: dict[str, Finished], name: str
) -> None:
    finished = runs[name]
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    losses = finished.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.3
    expected = losses_of_one_process(
        load_settings(finished.arguments, {}, RANKS[name]), RANKS[name]
    )
    if name in TOLERANCES:
        assert losses == pytest.approx(expected, rel=TOLERANCES[name])
    if name in ("fp16", "bf16", "powersgd"):
        assert losses != pytest.approx(expected, rel=1e-7)  # the hook really was at work


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    _assert_traffic(runs[name], RANKS[name])


@pytest.mark.multiproc
def test_compressed_gradients_are_smaller(runs: dict[str, Finished]) -> None:
    sizes = {}
    for name in ("static", "fp16", "bf16", "powersgd"):
        sent = runs[name].operations(0)[STEPS - 1]
        sizes[name] = sum(size for operation, size in sent if operation == "all_reduce")
    assert sizes["fp16"] == sizes["bf16"] == sizes["static"] // 2
    assert sizes["powersgd"] < sizes["static"] / 4


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name", ["powersgd", "static", "uneven", "buffers", "static-buffers", "uneven-buffers"]
)
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    original = runs[name]
    checkpoint = f"step-{HALFWAY:08d}"
    shutil.copytree(
        original.folder / "checkpoints" / checkpoint, tmp_path / "checkpoints" / checkpoint
    )
    resumed = _run(tmp_path, name)
    assert resumed.code == 0, resumed.output
    later = {step: loss for step, loss in original.losses().items() if step > HALFWAY}
    assert resumed.losses() == later  # exactly
    _assert_traffic(resumed, RANKS[name], resumed_after=HALFWAY)


@pytest.mark.multiproc
def test_errors_of_powersgd_are_those_of_each_rank(runs: dict[str, Finished]) -> None:
    """Without them in the checkpoint, resuming could not be exact."""
    folder = runs["powersgd"].folder / "checkpoints" / f"step-{STEPS:08d}"
    states = [torch.load(folder / f"rank-{rank}.pt")["strategy"] for rank in range(3)]
    assert states[0]["iter"] == STEPS
    assert states[0]["errors"].keys() == states[1]["errors"].keys() != set()
    assert not torch.equal(states[0]["errors"][0], states[1]["errors"][0])
    assert torch.equal(states[0]["qs"][0], states[1]["qs"][0])


@pytest.mark.multiproc
def test_no_checkpoint_is_written_once_a_rank_is_out_of_batches(runs: dict[str, Finished]) -> None:
    folder = runs["uneven"].folder / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == [f"step-{HALFWAY:08d}"]
    settings = load_settings(runs["uneven"].arguments, {}, 3)
    assert last_steps(settings, 3) == [10, 8, 6]


@pytest.mark.parametrize(
    ("ratio", "ranks", "expected"),
    [("0", 3, [10, 10, 10]), ("0.5", 1, [10]), ("0.99", 2, [10, 1]), ("0.25", 3, [10, 9, 8])],
)
def test_ranks_run_out_one_after_the_other(ratio: str, ranks: int, expected: list[int]) -> None:
    settings = load_settings(["--steps", "10", "--uneven-ratio", ratio], {}, ranks)
    assert last_steps(settings, ranks) == expected


@pytest.mark.parametrize(
    "other",
    [["--comm-hook", "fp16"], ["--static-graph"], ["--strategy", "ring"]],
    ids=["hook", "static", "ring"],
)
def test_uneven_data_is_refused_where_it_would_be_wrong(other: list[str]) -> None:
    with pytest.raises(SettingError, match="uneven_ratio"):
        load_settings(["--uneven-ratio", "0.2", *other], {}, 2)


def _assert_traffic(finished: Finished, ranks: int, resumed_after: int = 0) -> None:
    settings = load_settings(finished.arguments, {}, ranks)
    for rank in range(ranks):
        counted = {
            step: Counter(Message(*operation) for operation in operations)
            for step, operations in finished.operations(rank).items()
        }
        assert counted == expected_traffic(
            settings, rank=rank, world_size=ranks, resumed_after=resumed_after
        )
