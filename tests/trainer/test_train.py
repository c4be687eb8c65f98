"""Whole runs on several ranks: the losses are right, resuming is exact, traffic is as computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_losses_of_one_process,
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
)

pytestmark = pytest.mark.multiproc

STEPS = 10
HALFWAY = 5
DDP_RANKS = 3  # the sum of two numbers does not depend on their order, that of three does
PIPELINE_RANKS = 2
RUNS: dict[str, tuple[int, int, str]] = {  # ranks, shards of the data, arguments
    "ddp": (DDP_RANKS, DDP_RANKS, "--microbatches 2 --bucket-mib 0.05"),
    "gpipe": (
        PIPELINE_RANKS,
        1,
        "--strategy pipeline --schedule gpipe --microbatches 3"
        " --validate-every 4 --validate-batches 2",
    ),
    "1f1b": (PIPELINE_RANKS, 1, "--strategy pipeline --microbatches 4 --clip 0.5"),
    "ring": (DDP_RANKS, DDP_RANKS, "--strategy ring"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name, ranks, *_arguments(folder / name, arguments))
        for name, (ranks, _, arguments) in RUNS.items()
    }


def _arguments(folder: Path, arguments: str) -> list[str]:
    return with_checkpoints(folder, arguments, steps=STEPS, every=HALFWAY)


@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    ranks, num_shards, _ = RUNS[name]
    assert_losses_of_one_process(runs[name], ranks, num_shards=num_shards)


@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RUNS[name][0])


@pytest.mark.parametrize("name", ["ddp", "1f1b", "ring"])
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    assert_resumes_bit_for_bit(runs[name], RUNS[name][0], tmp_path, after=HALFWAY)


def test_validation_is_logged_where_the_loss_is_known(runs: dict[str, Finished]) -> None:
    lines = [line for line in runs["gpipe"].output.splitlines() if "validation loss" in line]
    assert ["rank 1" in line for line in lines] == [True, True], lines
    assert [line.partition("step ")[2].split()[0] for line in lines] == ["4", "8"]
