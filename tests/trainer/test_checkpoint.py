from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rankscope_trainer.checkpoint import Checkpoints, Progress
from rankscope_trainer.checkpoint_folder import finished
from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Sample
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import GPT
from rankscope_trainer.strategies.strategy import Strategy
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World
from tests.trainer.launch import run
from tests.trainer.whole_runs import assert_traffic_as_computed

MODEL = {"strategy": "ddp", "width": 8}


class Net(Strategy):
    """The least that has weights, an optimizer and a state of its own."""

    is_replicated = True

    def __init__(self) -> None:
        self.model = cast(GPT, torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.residual = torch.zeros(2)

    def train_batch(self, batch: Sample) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(3)).sum()
        loss.backward()
        return loss

    validation_loss = train_batch

    def state(self) -> dict[str, Any]:
        return {"residual": self.residual}

    def load_state(self, state: dict[str, Any]) -> None:
        self.residual = state["residual"]


def _checkpoints(folder: Path, world: World, keep: int = 2, **shape: int) -> Checkpoints:
    return Checkpoints(str(folder), keep=keep, world=world, shape=shape or MODEL)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept(world: World, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path / "new", world)
    assert checkpoints.newest_step() == 0
    for step in (9, 10, 11):
        checkpoints.save(Progress(step=step, position=step), Net(), has_weights=True)
    assert _names(tmp_path / "new") == ["step-00000010", "step-00000011"]
    assert checkpoints.newest_step() == 11


def test_what_was_interrupted_is_never_resumed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _checkpoints(tmp_path, world)
    checkpoints.save(Progress(step=5, position=5), Net(), has_weights=True)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(Progress(step=6, position=6), Net(), has_weights=True)
    assert _names(tmp_path) == ["step-00000005", "step-00000006.tmp"]
    assert checkpoints.newest_step() == 5
    checkpoints.remove_unfinished()
    assert _names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_of_the_same_step_is_replaced(world: World, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path, world)
    for position in (1, 2):
        checkpoints.save(Progress(step=5, position=position), Net(), has_weights=True)
    assert checkpoints.load(5, Net(), part=0) == Progress(step=5, position=2)


def test_a_checkpoint_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    _checkpoints(tmp_path, world).save(Progress(step=5, position=5), Net(), has_weights=True)
    with pytest.raises(SettingError, match=r"width = 8, not 16\. Choose the same.*--no-resume"):
        _checkpoints(tmp_path, world, width=16).load(5, Net(), part=0)


def _trained() -> Net:
    net = Net()
    net.train_batch((torch.empty(0), torch.empty(0)))
    net.update()
    net.residual = torch.tensor([0.5, -0.25])
    return net


def _assert_equal(one: Net, other: Net) -> None:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    moments = [net.optimizer.state_dict()["state"][0]["exp_avg"] for net in (one, other)]
    assert torch.equal(*moments)
    assert torch.equal(one.residual, other.residual)


def test_everything_comes_back(world: World, tmp_path: Path) -> None:
    net, other = _trained(), Net()
    checkpoints = _checkpoints(tmp_path, world)
    checkpoints.save(Progress(step=5, position=7), net, has_weights=True)
    drawn = torch.rand(4)
    assert checkpoints.load(5, other, part=0) == Progress(step=5, position=7)
    assert torch.equal(torch.rand(4), drawn)
    _assert_equal(net, other)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (2, 3)], ids=["known", "new"])
def test_an_elastic_run_goes_on_with_other_ranks(
    world: World, tmp_path: Path, rank: int, world_size: int
) -> None:
    net, other = _trained(), Net()
    _checkpoints(tmp_path, world).save(Progress(step=5, position=7), net, has_weights=True)
    changed = World(rank, world_size, world.device)
    with pytest.raises(SettingError, match=f"world_size = 1, not {world_size}"):
        _checkpoints(tmp_path, changed).load(5, other, part=0)
    elastic = Checkpoints(str(tmp_path), keep=2, world=changed, shape=MODEL, is_elastic=True)
    assert elastic.load(5, other, part=0) == Progress(step=5, position=7)
    _assert_equal(net, other)
    drawn = torch.rand(4)
    elastic.load(5, other, part=0)
    assert torch.equal(torch.rand(4), drawn)  # new numbers, and the same each time
    Checkpoints(
        str(tmp_path), keep=2, world=World(1, 2, world.device), shape=MODEL, is_elastic=True
    ).load(5, other, part=0)
    assert not torch.equal(torch.rand(4), drawn)  # other ranks draw others


def test_attempts_are_counted(world: World, tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path / "new", world)
    assert checkpoints.begin_attempt(world_size=2, resumed_after=0) == 0
    assert checkpoints.begin_attempt(world_size=1, resumed_after=5) == 1
    assert (tmp_path / "new" / "attempts.jsonl").read_text() == (
        '{"attempt": 0, "world_size": 2, "resumed_after": 0}\n'
        '{"attempt": 1, "world_size": 1, "resumed_after": 5}\n'
    )


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
    assert resumed.batches.position == whole.batches.position
    pairs = zip(whole.strategy.model.parameters(), resumed.strategy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def _saved(checkpoints: Checkpoints, losses: dict[int, float | None]) -> Checkpoints:
    for step, loss in losses.items():
        checkpoints.save(Progress(step=step, position=step, loss=loss), Net(), has_weights=True)
    return checkpoints


def test_the_best_is_kept_beside_the_newest(world: World, tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=1, keep_best=True, world=world, shape=MODEL)
    _saved(checkpoints, {1: 2.0, 2: 1.5, 3: math.nan, 4: None, 5: 1.5})
    assert _names(tmp_path) == ["step-00000002", "step-00000005"]
    _saved(checkpoints, {6: 1.0, 7: 3.0})
    assert _names(tmp_path) == ["step-00000006", "step-00000007"]
    assert checkpoints.newest_step() == 7
    assert checkpoints.best_step() == 6
    assert _names(tmp_path) == ["step-00000006"]  # a newer one is of a run that was given up


def test_without_a_known_loss_none_is_the_best(world: World, tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=2, keep_best=True, world=world, shape=MODEL)
    _saved(checkpoints, {1: None, 2: math.nan})
    assert checkpoints.best_step() == 0
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def test_one_whose_removal_was_interrupted_is_none_any_more(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _saved(_checkpoints(tmp_path, world, keep=1), {1: None})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            _saved(checkpoints, {2: None})
    assert _names(tmp_path) == ["step-00000001.tmp", "step-00000002"]
    checkpoints.remove_unfinished()
    assert _names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ("--keep-best", "keep_best", "no checkpoint is written"),
        ("--keep-best --checkpoint-dir c --validate-every 4 --checkpoint-every 6", "keep_best",
         "multiple of validate_every"),
        ("--resume-from best", "resume_from", "no checkpoint"),
        ("--resume-from best --checkpoint-dir c --no-resume", "resume_from", "no checkpoint"),
        ("--keep-best --checkpoint-dir c --uneven-ratio 0.2", "uneven_ratio", "keep_best"),
    ],
)  # fmt: skip
def test_what_makes_no_checkpoint_the_best_is_refused(
    arguments: str, name: str, words: str
) -> None:
    with pytest.raises(SettingError, match=words) as raised:
        load_settings(arguments.split(), {}, 2)
    assert raised.value.name == name


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("measured", "strategy"), [("training", "ddp"), ("validation", "pipeline")]
)
def test_the_best_survives_a_kill_and_can_be_gone_back_to(
    tmp_path: Path, measured: str, strategy: str
) -> None:
    """The rate of learning explodes after a while: from then on each checkpoint is worse."""
    common = ["--strategy", strategy, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    common += ["--checkpoint-every", "3", "--checkpoint-keep", "1", "--keep-best"]
    common += ["--validate-every", "3", "--validate-batches", "2"] * (measured == "validation")
    explodes = ["--fault", "exploding_loss:rank=all,start=10,steps=3"]
    killed = run(
        tmp_path, 2, *common, *explodes, "--fault", "sigkill:rank=1,start=17", "--steps", "30"
    )
    assert killed.code != 0
    assert finished_steps(tmp_path / "checkpoints") == [9, 15], killed.output
    losses = {
        step: json.loads((path / "checkpoint.json").read_text())["loss"]
        for step, path in zip([9, 15], finished(tmp_path / "checkpoints"), strict=True)
    }
    assert losses[9] < losses[15]
    again = run(tmp_path, 2, *common, "--resume-from", "best", "--steps", "12")
    assert again.code == 0, again.output
    assert again.output.count("resumed after step 9") == 2
    assert finished_steps(tmp_path / "checkpoints") == [12]  # better, as nothing exploded
    assert_traffic_as_computed(again, 2, resumed_after=9)


def finished_steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in finished(folder)]
