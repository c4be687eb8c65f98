"""Pipelines on real ranks: every schedule and split trains like a single process, exactly."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankscope_trainer.settings import load_settings
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message
from tests.trainer.launch import Finished, run
from tests.trainer.test_train import assert_equal, reference_losses

STEPS = 6
HALFWAY = 3
VALIDATION = "--validate-every 2 --validate-batches 2"
RUNS: dict[str, tuple[int, str]] = {
    "interleaved": (
        2,
        f"--strategy pipeline --schedule interleaved --microbatches 4 --clip 0.5 {VALIDATION}",
    ),
    "zero_bubble": (2, f"--strategy pipeline --schedule zero_bubble --microbatches 4 {VALIDATION}"),
    "zero_bubble_v": (
        2,
        "--strategy pipeline --schedule zero_bubble_v --microbatches 4 --clip 0.5"
        " --layers 6 --stage-layers 1,3,1,1",
    ),
    "uneven": (3, "--strategy pipeline --stage-layers 1,2,1 --microbatches 3"),
    # The first layer takes longer by far than all others, so it stands alone.
    "profile": (
        2,
        "--strategy pipeline --schedule gpipe --balance profile --microbatches 2"
        " --layer-seconds 0.04,0,0,0",
    ),
    "model_parallel": (
        3,
        f"--strategy model_parallel --batch-size 8 --clip 0.5 --stage-layers 2,1,1 {VALIDATION}",
    ),
}
RESUMED = ("zero_bubble", "zero_bubble_v", "profile", "model_parallel")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("pipelines")
    return {
        name: run(folder / name, ranks, *_arguments(folder / name, arguments))
        for name, (ranks, arguments) in RUNS.items()
    }


def _arguments(folder: Path, arguments: str) -> list[str]:
    checkpoints = ["--checkpoint-dir", str(folder / "checkpoints")]
    checkpoints += ["--checkpoint-every", str(HALFWAY)]
    return [*arguments.split(), *checkpoints, "--steps", str(STEPS)]


def _resumed(original: Finished, folder: Path, ranks: int, arguments: str) -> Finished:
    """Go on from the middle of another run."""
    checkpoint = f"step-{HALFWAY:08d}"
    shutil.copytree(
        original.folder / "checkpoints" / checkpoint, folder / "checkpoints" / checkpoint
    )
    return run(folder, ranks, *_arguments(folder, arguments))


def _assert_traffic(finished: Finished, ranks: int, resumed_after: int = 0) -> None:
    settings = load_settings(finished.arguments, {}, ranks)
    for rank in range(ranks):
        operations = finished.operations(rank)
        counted = {
            step: Counter(Message(*operation) for operation in operations.get(step, []))
            for step in {0, *operations}
        }
        assert counted == expected_traffic(
            settings, rank=rank, world_size=ranks, resumed_after=resumed_after
        )


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    finished, ranks = runs[name], RUNS[name][0]
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    settings = load_settings(finished.arguments, {}, ranks)
    # The same numbers are added up in another order; nothing else may differ.
    assert finished.losses() == pytest.approx(reference_losses(settings, ranks), rel=2e-5)
    assert finished.losses()[STEPS] < finished.losses()[1] - 0.1


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    _assert_traffic(runs[name], RUNS[name][0])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    original, (ranks, arguments) = runs[name], RUNS[name]
    # Measured anew, the last layer would now stand alone; but its weights are on another rank.
    resumed = _resumed(original, tmp_path, ranks, arguments.replace("0.04,0,0,0", "0,0,0,0.04"))

    assert resumed.code == 0, resumed.output
    expected = {step: loss for step, loss in original.losses().items() if step > HALFWAY}
    assert resumed.losses() == expected  # exactly
    for rank in range(ranks):
        last = Path("checkpoints", f"step-{STEPS:08d}", f"rank-{rank}.pt")
        parts = [torch.load(one.folder / last, weights_only=True) for one in (original, resumed)]
        assert_equal(*parts)
    _assert_traffic(resumed, ranks, resumed_after=HALFWAY)


@pytest.mark.multiproc
def test_each_stage_holds_the_layers_that_were_asked_for(runs: dict[str, Finished]) -> None:
    assert _layers_of_ranks(runs["uneven"], 3) == [["0"], ["1", "2"], ["3"]]
    assert _layers_of_ranks(runs["profile"], 2) == [["0"], ["1", "2", "3"]]
    assert _layers_of_ranks(runs["model_parallel"], 3) == [["0", "1"], ["2"], ["3"]]
    assert _layers_of_ranks(runs["interleaved"], 2) == [["0", "2"], ["1", "3"]]
    assert _layers_of_ranks(runs["zero_bubble_v"], 2) == [["0", "5"], ["1", "2", "3", "4"]]
    assert "layers of each stage: 1,3\n" in runs["profile"].output


def _layers_of_ranks(finished: Finished, ranks: int) -> list[list[str]]:
    folder = finished.folder / "checkpoints" / f"step-{STEPS:08d}"
    parts = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [
        sorted({name.partition("blocks.")[2].split(".")[0] for name in part["model"]} - {""})
        for part in parts
    ]


@pytest.mark.multiproc
def test_weights_are_not_resumed_where_others_are_wanted(
    runs: dict[str, Finished], tmp_path: Path
) -> None:
    arguments = RUNS["uneven"][1].replace("1,2,1", "2,1,1")
    refused = _resumed(runs["uneven"], tmp_path, 3, arguments)
    assert refused.code != 0
    assert "was written with stage_layers = '1,2,1', not '2,1,1'" in refused.output
