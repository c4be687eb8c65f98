"""What tests of strategies ask of a whole run: losses, traffic, and to resume bit for bit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rankscope_trainer.checkpoint_folder import finished as finished_checkpoints
from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model, build_optimizer
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message, Traffic
from rankscope_trainer.strategies.traffic.sharded import PICKLED_BYTES
from rankscope_trainer.strategies.uneven import last_steps
from tests.trainer.launch import COUNTED_TRAINER, SMALL, Finished, run

WRITES_OBJECTS = {"fsdp", "tensor", "hybrid"}  # as a part of their checkpoints
NEVER_OBJECTS = {4, 8}  # sizes that the trainer's own collectives, and DCP's numbers, have


def batches_of_shards(settings: Settings, ranks: int, num_shards: int) -> list[Batches]:
    """Return the training batches that each shard of the data draws."""
    text = read_standard_library(settings.data_bytes)
    windows = ByteWindows(split_text(text, settings.validation_ratio)[0], settings.context)
    size = settings.batch_size * settings.microbatches_for(ranks)
    return [
        Batches(windows, batch_size=size, shard=shard, num_shards=num_shards, seed=settings.seed)
        for shard in range(num_shards)
    ]


def train_alone(
    settings: Settings, ranks: int, num_shards: int = 1
) -> tuple[dict[int, float], GPT]:
    """Train in this process; return the losses of the first shard by step, and the model."""
    shards = [iter(batches) for batches in batches_of_shards(settings, ranks, num_shards)]
    model = build_model(settings)
    optimizer = build_optimizer(settings, model)
    losses: dict[int, float] = {}
    for step in range(1, settings.steps + 1):
        last = last_steps(settings, num_shards)
        present = [batches for shard, batches in enumerate(shards) if step <= last[shard]]
        for batches in present:
            inputs, targets = next(batches)
            loss = next_byte_loss(model(inputs), targets)
            (loss / len(present)).backward()
            if batches is shards[0]:
                losses[step] = loss.item()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def losses_of_windows(settings: Settings, global_batch: int) -> dict[int, list[float]]:
    """Train in this process; return the loss of each window, in the order of the step's slice."""
    text = split_text(read_standard_library(settings.data_bytes), settings.validation_ratio)[0]
    windows = ByteWindows(text, settings.context)
    batches = iter(Batches(windows, batch_size=global_batch, seed=settings.seed))
    model = build_model(settings)
    optimizer = build_optimizer(settings, model)
    losses: dict[int, list[float]] = {}
    for step in range(1, settings.steps + 1):
        inputs_BT, targets_BT = next(batches)
        logits_BTV = model(inputs_BT)
        each_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
        each_BT.mean().backward()
        losses[step] = each_BT.mean(1).tolist()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run_in_turns(
    folder: Path, flags: str, sizes: Sequence[int], steps: int, more: Sequence[str] = ()
) -> list[Finished]:
    """Train `steps` with each number of ranks, from the checkpoint of the one before.

    `more` are flags of each, where they differ.
    """
    checkpoints = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every"]
    runs = []
    for number, ranks in enumerate(sizes, 1):
        own = [*(more[number - 1].split() if more else []), "--steps", str(steps * number)]
        runs.append(run(folder, ranks, *flags.split(), *own, *checkpoints, str(steps)))
        assert runs[-1].code == 0, runs[-1].output
    return runs


def assert_losses_of_one_process(
    finished: Finished, ranks: int, *, num_shards: int = 1, rel: float = 2e-5, falls_by: float = 0.3
) -> None:
    """The same numbers are added up in another order; nothing else may differ."""
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output, finished.output
    settings = load_settings(finished.arguments, {}, ranks)
    expected, _ = train_alone(settings, ranks, num_shards)
    losses = finished.losses()
    assert losses == pytest.approx(expected, rel=rel)
    assert losses[settings.steps] < losses[1] - falls_by


def assert_traffic_as_computed(finished: Finished, ranks: int, *, resumed_after: int = 0) -> None:
    """What each rank sent and received in each step is what the settings alone say."""
    settings = load_settings(finished.arguments, {}, ranks)
    for rank in range(ranks):
        expected = expected_traffic(
            settings, rank=rank, world_size=ranks, resumed_after=resumed_after
        )
        traffic = counted_traffic(finished, rank, settings)
        assert traffic == {step: sent for step, sent in expected.items() if sent}, f"rank {rank}"


def counted_traffic(finished: Finished, rank: int, settings: Settings) -> dict[int, Traffic]:
    """Return what was counted by step, with one size for all pickled objects of a checkpoint."""
    to_message = _message if settings.strategy in WRITES_OBJECTS else Message
    return {
        step: Counter(to_message(*operation) for operation in operations)
        for step, operations in finished.operations(rank).items()
        if operations
    }


def _message(operation: str, num_bytes: int) -> Message:
    is_object = operation in {"gather", "scatter", "broadcast"} and num_bytes not in NEVER_OBJECTS
    return Message(operation, PICKLED_BYTES if is_object else num_bytes)


def resume(
    original: Finished,
    ranks: int,
    folder: Path,
    *,
    after: int,
    program: Path = COUNTED_TRAINER,
    other_arguments: tuple[str, str] = ("", ""),
) -> Finished:
    """Go on from a checkpoint of another run, in a folder of its own, with the same arguments.

    `other_arguments`: a part of them, and what it is replaced by.
    """
    checkpoint = Path("checkpoints", f"step-{after:08d}")
    shutil.copytree(original.folder / checkpoint, folder / checkpoint)
    arguments = [text.replace(str(original.folder), str(folder)) for text in original.arguments]
    arguments = [text.replace(*other_arguments) if text else text for text in arguments]
    return run(folder, ranks, *arguments[len(SMALL) :], program=program)


def assert_resumes_bit_for_bit(
    original: Finished,
    ranks: int,
    folder: Path,
    *,
    after: int,
    program: Path = COUNTED_TRAINER,
    other_arguments: tuple[str, str] = ("", ""),
) -> Finished:
    """The losses, the newest checkpoint and the traffic are those of the run that went through."""
    resumed = resume(
        original, ranks, folder, after=after, program=program, other_arguments=other_arguments
    )
    assert resumed.code == 0, resumed.output
    later = {step: loss for step, loss in original.losses().items() if step > after}
    assert resumed.losses() == later  # exactly
    newest = [finished_checkpoints(each.folder / "checkpoints")[-1] for each in (original, resumed)]
    assert newest[0].name == newest[1].name
    for rank in range(ranks):
        parts = [torch.load(path / f"rank-{rank}.pt", weights_only=True) for path in newest]
        assert_equal(*parts)
    if (newest[0] / "sharded").exists():
        assert_equal(*(_whole_state(path, folder / "whole.pt") for path in newest))
    assert_traffic_as_computed(resumed, ranks, resumed_after=after)
    return resumed


def _whole_state(checkpoint: Path, whole: Path) -> object:
    """Return a sharded checkpoint, put together again by this process alone."""
    dcp_to_torch_save(checkpoint / "sharded", whole)
    return torch.load(whole, weights_only=True)


def assert_equal(one: object, other: object) -> None:
    """Compare nested containers of tensors, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)  # type: ignore[arg-type]
    elif isinstance(one, dict):
        assert one.keys() == other.keys()  # type: ignore[attr-defined]
        for key in one:
            assert_equal(one[key], other[key])  # type: ignore[index]
    elif isinstance(one, list | tuple):
        for part, other_part in zip(one, other, strict=True):  # type: ignore[call-overload]
            assert_equal(part, other_part)
    else:
        assert one == other
