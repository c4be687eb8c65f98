"""What tests of strategies with DTensors ask of a whole run."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rankscope_trainer.settings import load_settings
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.dcp import PICKLED_BYTES
from rankscope_trainer.strategies.traffic.message import Message, Traffic
from tests.trainer.launch import SMALL, Finished, run
from tests.trainer.test_train import assert_equal, reference_losses

STEPS, HALFWAY = 8, 4
NEVER_OBJECTS = {4, 8}  # sizes that the trainer's own collectives, and DCP's numbers, have


def arguments_of(folder: Path, flags: str) -> list[str]:
    """Return the flags of a run that writes checkpoints halfway and at its end."""
    checkpoints = ["--checkpoint-dir", str(folder / "checkpoints")]
    checkpoints += ["--checkpoint-every", str(HALFWAY)]
    return [*flags.split(), *checkpoints, "--steps", str(STEPS), "--log-every", "4"]


def assert_losses_of_one_process(
    finished: Finished, ranks: int, *, num_shards: int, rel: float = 2e-5
) -> None:
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output, finished.output
    settings = load_settings(finished.arguments, {}, ranks)
    expected = reference_losses(settings, ranks, num_shards)
    # The same numbers are added up in another order; nothing else may differ.
    assert finished.losses() == pytest.approx(expected, rel=rel)
    assert finished.losses()[STEPS] < finished.losses()[1] - 0.3


def assert_traffic_as_computed(finished: Finished, ranks: int, *, resumed_after: int = 0) -> None:
    settings = load_settings(finished.arguments, {}, ranks)
    for rank in range(ranks):
        expected = expected_traffic(
            settings, rank=rank, world_size=ranks, resumed_after=resumed_after
        )
        assert _counted(finished, rank) == expected, f"rank {rank}"


def assert_resumes_bit_for_bit(original: Finished, ranks: int, folder: Path) -> None:
    checkpoint = f"step-{HALFWAY:08d}"
    shutil.copytree(
        original.folder / "checkpoints" / checkpoint, folder / "checkpoints" / checkpoint
    )
    flags = [text.replace(str(original.folder), str(folder)) for text in original.arguments]
    resumed = run(folder, ranks, *flags[len(SMALL) :])
    assert resumed.code == 0, resumed.output
    expected = {step: loss for step, loss in original.losses().items() if step > HALFWAY}
    assert resumed.losses() == expected  # exactly
    assert_equal(*(_final_state(finished.folder) for finished in (original, resumed)))
    assert_traffic_as_computed(resumed, ranks, resumed_after=HALFWAY)


def _final_state(folder: Path) -> object:
    """Return the last checkpoint, put together again by this process alone."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoints" / f"step-{STEPS:08d}" / "sharded", whole)
    return torch.load(whole, weights_only=True)


def _counted(finished: Finished, rank: int) -> dict[int, Traffic]:
    """Return what was counted by step, with one size for all pickled objects of a checkpoint."""
    by_step = finished.operations(rank)
    return {
        step: Counter(_message(operation, size) for operation, size in by_step.get(step, []))
        for step in {0, *by_step}
    }


def _message(operation: str, num_bytes: int) -> Message:
    is_object = operation in {"gather", "scatter", "broadcast"} and num_bytes not in NEVER_OBJECTS
    return Message(operation, PICKLED_BYTES if is_object else num_bytes)
