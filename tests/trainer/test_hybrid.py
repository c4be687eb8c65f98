"""Data x pipeline x tensor parallel in one mesh: losses, traffic, checkpoints."""

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
TINY = "--width 16 --context 16 --layers 2 --batch-size 2 --learning-rate 5e-3"
# name -> ranks, shards of the data, flags
RUNS: dict[str, tuple[int, int, str]] = {
    "2x2x1": (4, 2, "--tensor-parallel 1 --clip 0.5 --validate-every 4 --validate-batches 2"),
    "1x2x2": (4, 1, "--data-parallel 1 --sequence-parallel --clip 0.5"),
    "2x2x2": (8, 2, f"--sequence-parallel --clip 0.5 {TINY}"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name, ranks, *_arguments(folder / name, flags))
        for name, (ranks, _, flags) in RUNS.items()
    }


def _arguments(folder: Path, flags: str) -> list[str]:
    return with_checkpoints(folder, f"--strategy hybrid {flags}", steps=STEPS, every=HALFWAY)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    ranks, num_shards, _ = RUNS[name]
    assert_losses_of_one_process(runs[name], ranks, num_shards=num_shards)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RUNS[name][0])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["2x2x1", "1x2x2"])
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    assert_resumes_bit_for_bit(runs[name], RUNS[name][0], tmp_path, after=HALFWAY)


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        ([], "data_parallel", "2 x 2 x 2 ranks are not the 4 that there are"),
        (["--tensor-parallel", "1", "--layers", "1"], "layers", "cannot fill 2 pipeline stages"),
        (["--tensor-parallel", "1", "--microbatches", "1"], "microbatches", "Give at least 2"),
        (["--data-parallel", "1", "--heads", "1"], "heads", "2 ranks cannot share 1 heads"),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words) as raised:
        load_settings(["--strategy", "hybrid", *flags], {}, world_size=4)
    assert raised.value.name == name
