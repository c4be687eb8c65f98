from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankscope_trainer.checkpoint import Checkpoints, Progress
from rankscope_trainer.errors import SettingError
from rankscope_trainer.settings import load_settings
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World, join_world

MODEL = {"width": 8}


@pytest.fixture
def world() -> Iterator[World]:
    """A process group of this process alone."""
    yield join_world(device="cpu", timeout_seconds=30)
    dist.destroy_process_group()


def _net() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(3, 2)
    return net, torch.optim.AdamW(net.parameters())


def _checkpoints(folder: Path, world: World, keep: int = 2, **shape: int) -> Checkpoints:
    return Checkpoints(str(folder), keep=keep, world=world, shape=shape or MODEL)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept(world: World, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path / "new", world)
    assert checkpoints.newest_step() == 0
    for step in (9, 10, 11):
        checkpoints.save(Progress(step=step, position=step), *_net(), has_weights=True)
    assert _names(tmp_path / "new") == ["step-00000010", "step-00000011"]
    assert checkpoints.newest_step() == 11


def test_what_was_interrupted_is_never_resumed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _checkpoints(tmp_path, world)
    checkpoints.save(Progress(step=5, position=5), *_net(), has_weights=True)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(Progress(step=6, position=6), *_net(), has_weights=True)
    assert _names(tmp_path) == ["step-00000005", "step-00000006.tmp"]
    assert checkpoints.newest_step() == 5
    checkpoints.remove_unfinished()
    assert _names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(world: World, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path, world)
    for position in (1, 2):
        checkpoints.save(Progress(step=5, position=position), *_net(), has_weights=True)
    assert checkpoints.load(5, *_net(), part=0) == Progress(step=5, position=2)


def test_a_checkpoint_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    net = _net()
    _checkpoints(tmp_path, world).save(Progress(step=5, position=5), *net, has_weights=True)
    with pytest.raises(SettingError, match=r"width = 8, not 16\. Choose the same.*--no-resume"):
        _checkpoints(tmp_path, world, width=16).load(5, *net, part=0)


def test_everything_comes_back(world: World, tmp_path: Path) -> None:
    net, optimizer = _net()
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = _checkpoints(tmp_path, world)
    checkpoints.save(Progress(step=5, position=7), net, optimizer, has_weights=True)
    drawn = torch.rand(4)
    other, other_optimizer = _net()
    assert checkpoints.load(5, other, other_optimizer, part=0) == Progress(step=5, position=7)
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    moments = other_optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moments, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_dropout_goes_on_with_the_same_random_numbers(
    world: World, tmp_path: Path, strategy: str
) -> None:
    """Also across the end of an epoch, which is after step 11 here."""
    common = ["--strategy", strategy, "--layers", "1", "--width", "8", "--heads", "2"]
    common += ["--context", "16", "--data-bytes", "1700", "--dropout", "0.3"]
    common += ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "10"]
    whole = Trainer(load_settings([*common, "--steps", "14", "--no-resume"], {}), world)
    assert len(whole.batches._loader) == 11
    whole.run()
    resumed = Trainer(load_settings([*common, "--steps", "14"], {}), world)
    resumed.run()
    assert resumed.batches.position == whole.batches.position == 14
    pairs = zip(whole.strategy.model.parameters(), resumed.strategy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
