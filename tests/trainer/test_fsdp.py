"""FSDP2 on several ranks: losses, traffic, precision and sharded checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies.strategy import build_model
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_losses_of_one_process,
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
)

STEPS, HALFWAY = 8, 4
RUNS: dict[str, tuple[int, str]] = {
    # Three ranks: the parts of a tensor are unequal, and the order of three addends matters.
    "row": (3, "--clip 0.5 --validate-every 4 --validate-batches 2 --checkpoint-activations"),
    "replicas": (4, "--replicas 2 --clip 0.5 --microbatches 1"),
    "bf16": (2, "--precision bf16"),
    "fp16": (2, "--precision fp16 --clip 0.5"),
}
ROUNDED = {"bf16": 1e-3, "fp16": 1e-4}  # 8 and 11 bits of significand


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: run(folder / name, ranks, *_arguments(folder / name, flags))
        for name, (ranks, flags) in RUNS.items()
    }


def _arguments(folder: Path, flags: str) -> list[str]:
    return with_checkpoints(folder, f"--strategy fsdp {flags}", steps=STEPS, every=HALFWAY)


@pytest.mark.core
@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_a_single_process(runs: dict[str, Finished], name: str) -> None:
    ranks = RUNS[name][0]
    assert_losses_of_one_process(runs[name], ranks, num_shards=ranks, rel=ROUNDED.get(name, 2e-5))


@pytest.mark.multiproc
def test_sixteen_bits_are_really_used(runs: dict[str, Finished]) -> None:
    losses = {name: runs[name].losses()[STEPS] for name in ROUNDED}
    assert len(set(losses.values())) == 2  # those of 32 bits would be equal


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RUNS[name][0])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["row", "replicas"])
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    assert_resumes_bit_for_bit(runs[name], RUNS[name][0], tmp_path, after=HALFWAY)


@pytest.mark.multiproc
def test_a_checkpoint_holds_every_tensor_once(runs: dict[str, Finished]) -> None:
    folder = runs["replicas"].folder / "checkpoints" / f"step-{STEPS:08d}" / "sharded"
    metadata = FileSystemReader(folder).read_metadata()
    tensors = {
        name: tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    model = build_model(load_settings(runs["replicas"].arguments, {}, 4))
    assert len(tensors) == 4 * len(list(model.parameters()))  # weight, two moments, step
    for tensor in tensors.values():
        assert sum(math.prod(part.sizes) for part in tensor.chunks) == math.prod(tensor.size)
    # Replicas hold equal parts, and nothing of the files is a second copy of one.
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert sum(part.length for part in metadata.storage_data.values()) == sum(sizes.values())
    assert {part.relative_path for part in metadata.storage_data.values()} == sizes.keys()
    assert len(sizes) == 4  # all ranks wrote


def test_replicas_must_divide_the_ranks() -> None:
    with pytest.raises(SettingError, match="6 ranks cannot form 4 equal replicas"):
        load_settings(["--strategy", "fsdp", "--replicas", "4"], {}, world_size=6)
