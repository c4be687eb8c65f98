"""Tensor parallel on several ranks: losses, traffic, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_losses_of_one_process,
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
)

STEPS, HALFWAY = 8, 4
RANKS = 2
RUNS = {
    "whole": "--clip 0.5 --validate-every 4 --validate-batches 2",
    "sequence": "--sequence-parallel --validate-every 4 --validate-batches 1",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name, RANKS, *_arguments(folder / name, flags))
        for name, flags in RUNS.items()
    }


def _arguments(folder: Path, flags: str) -> list[str]:
    return with_checkpoints(folder, f"--strategy tensor {flags}", steps=STEPS, every=HALFWAY)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    assert_losses_of_one_process(runs[name], RANKS, num_shards=1)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RANKS)


@pytest.mark.multiproc
def test_a_resumed_run_goes_on_bit_for_bit(runs: dict[str, Finished], tmp_path: Path) -> None:
    assert_resumes_bit_for_bit(runs["sequence"], RANKS, tmp_path, after=HALFWAY)


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        (["--heads", "2"], "heads", "4 ranks cannot share 2 heads evenly"),
        (["--sequence-parallel", "--context", "30"], "context", "cannot share 30 positions"),
        (["--dropout", "0.1"], "dropout", "Give 0, or choose sequence_parallel"),
    ],
)
def test_what_cannot_be_cut_is_refused(flags: list[str], name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words) as raised:
        load_settings(["--strategy", "tensor", *flags], {}, world_size=4)
    assert raised.value.name == name
