"""Pipelines on real ranks: every schedule and split trains like a single process, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import FLOAT32_BYTES, Message
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_losses_of_one_process,
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
    resume,
)

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
    # The first layer takes longer by far than all others, so it is alone.
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
    return with_checkpoints(folder, arguments, steps=STEPS, every=HALFWAY)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    assert_losses_of_one_process(runs[name], RUNS[name][0], falls_by=0.1)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RUNS[name][0])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    # Measured anew, the last layer would now be alone; but its weights are on another rank.
    other = ("0.04,0,0,0", "0,0,0,0.04")
    ranks = RUNS[name][0]
    assert_resumes_bit_for_bit(runs[name], ranks, tmp_path, after=HALFWAY, other_arguments=other)


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
    other = ("1,2,1", "2,1,1")
    refused = resume(runs["uneven"], 3, tmp_path, after=HALFWAY, other_arguments=other)
    assert refused.code != 0
    assert "was written with stage_layers = '1,2,1', not '2,1,1'" in refused.output


@pytest.mark.parametrize(
    ("schedule", "stages", "times"),
    [("interleaved", 2, 7 / 3), ("interleaved", 4, 15 / 3), ("zero_bubble_v", 2, 2.0)],
)
def test_stages_on_a_rank_multiply_the_messages_by_the_borders_that_they_have(
    schedule: str, stages: int, times: float
) -> None:
    """With p ranks and v stages on each (v p - 1) / (p - 1); the middle of a V is no message."""
    ranks, flags = 4, ["--strategy", "pipeline", "--layers", "16"]

    def sends(*more: str) -> int:
        settings = load_settings([*flags, *more], {}, ranks)
        activation = settings.batch_size * settings.context * settings.width * FLOAT32_BYTES
        of_ranks = [expected_traffic(settings, rank=r, world_size=ranks)[2] for r in range(ranks)]
        return sum(traffic[Message("send", activation)] for traffic in of_ranks)

    several = sends("--schedule", schedule, "--virtual-stages", str(stages))
    assert several == times * sends("--schedule", "1f1b")
