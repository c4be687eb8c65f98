"""Hogwild: what must hold although no two runs on several ranks are alike."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Batches, ByteWindows, Sample, read_standard_library, split_text
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.strategies import hogwild
from rankscope_trainer.strategies.hogwild import Hogwild, memory_bytes
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import assert_traffic_as_computed, resume

STEPS = 20
SAVED = 10
SGD = ["--strategy", "hogwild", "--optimizer", "sgd", "--learning-rate", "0.1"]
TINY = [*SGD, "--layers", "1", "--width", "16", "--heads", "2", "--context", "16"]
TINY += ["--data-bytes", "20000", "--device", "cpu"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Finished]:
    """A run on so many ranks, once, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("hogwild")
    return functools.cache(lambda ranks: _run(folder / str(ranks), ranks))


def _run(folder: Path, ranks: int) -> Finished:
    arguments = f"{' '.join(SGD)} --versions {folder / 'versions.jsonl'}"
    finished = run(folder, ranks, *with_checkpoints(folder, arguments, steps=STEPS, every=SAVED))
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    return finished


def _saved(folder: Path, step: int, rank: int) -> Any:
    path = folder / "checkpoints" / f"step-{step:08d}" / f"rank-{rank}.pt"
    return torch.load(path, weights_only=True)


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loss_falls(runs: Callable[[int], Finished], ranks: int) -> None:
    """Of the weights that hold all updates; the losses on the way depend on who came first."""
    finished = runs(ranks)
    assert list(finished.losses()) == list(range(1, STEPS + 1))
    settings = load_settings(finished.arguments, {}, ranks)
    text = split_text(read_standard_library(settings.data_bytes), settings.validation_ratio)[1]
    bytes_BT, next_BT = next(iter(Batches(ByteWindows(text, settings.context), batch_size=64)))
    model = build_model(settings)
    with torch.no_grad():
        before = next_byte_loss(model(bytes_BT), next_BT)
        model.load_state_dict(_saved(finished.folder, STEPS, 0)["model"])
        after = next_byte_loss(model(bytes_BT), next_BT)
    assert after < before - 0.3


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_update_of_every_rank_is_counted(runs: Callable[[int], Finished], ranks: int) -> None:
    folder = runs(ranks).folder
    for step, rank in itertools.product((SAVED, STEPS), range(ranks)):
        assert _saved(folder, step, rank)["strategy"] == {"updates": [step] * ranks}
    lines = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    of_rank = defaultdict(list)
    for line in lines:
        of_rank[line["rank"]].append(line)
    assert of_rank.keys() == set(range(ranks))
    for own in of_rank.values():
        assert [line["step"] for line in own] == list(range(1, STEPS + 1))
        for before, line in itertools.pairwise(own):
            # What it reads contains at least what it found when it wrote, and its own update.
            assert line["read_version"] > before["read_version"] + before["staleness"]
        for line in own:
            others = line["read_version"] + line["staleness"] - (line["step"] - 1)
            assert 0 <= line["staleness"] <= others <= (ranks - 1) * STEPS


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_save_the_same_weights(runs: Callable[[int], Finished], ranks: int) -> None:
    first = _saved(runs(ranks).folder, SAVED, 0)["model"]
    for rank in range(1, ranks):
        other = _saved(runs(ranks).folder, SAVED, rank)["model"]
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.multiproc
def test_a_resumed_run_goes_on_counting(runs: Callable[[int], Finished], tmp_path: Path) -> None:
    resumed = resume(runs(2), 2, tmp_path, after=SAVED)
    assert resumed.code == 0, resumed.output
    assert list(resumed.losses()) == list(range(SAVED + 1, STEPS + 1))
    assert _saved(tmp_path, STEPS, 1)["strategy"] == {"updates": [STEPS, STEPS]}
    assert_traffic_as_computed(resumed, 2, resumed_after=SAVED)


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [2, 3])
def test_traffic_of_each_step_is_the_computed_one(
    runs: Callable[[int], Finished], ranks: int
) -> None:
    assert_traffic_as_computed(runs(ranks), ranks)


def test_an_update_lands_on_top_of_those_that_came_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two ranks in one process, in an order that is known: their weights are the same memory."""
    path = tmp_path / "versions.jsonl"
    settings = load_settings(
        [*TINY, "--weight-decay", "0", "--versions", str(path)], {}, world_size=2
    )
    memory = torch.zeros(memory_bytes(build_model(settings), 2), dtype=torch.uint8)
    monkeypatch.setattr(hogwild, "share_memory", lambda num_bytes: memory)
    slow, fast = (Hogwild(settings, World(rank, 2, CPU)) for rank in range(2))
    expected = {name: p.detach().clone() for name, p in slow.model.named_parameters()}
    batches = iter(_batches())

    def write(strategy: Hogwild) -> None:
        for name, parameter in strategy.model.named_parameters():
            assert parameter.grad is not None
            expected[name] -= settings.learning_rate * parameter.grad
        strategy.update()

    slow.train_batch(next(batches))
    for _ in range(2):
        fast.train_batch(next(batches))
        write(fast)
    write(slow)
    fast.train_batch(next(batches))
    write(fast)

    for strategy in (slow, fast):
        for name, parameter in strategy.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6, atol=1e-7)
    assert slow.state() == fast.state() == {"updates": [1, 3]}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["rank"], line["read_version"], line["staleness"]) for line in lines] == [
        (1, 0, 0), (1, 1, 0), (0, 0, 2), (1, 3, 0),
    ]  # fmt: skip


def _batches() -> Batches:
    text = split_text(read_standard_library(20_000), 0.1)[0]
    return Batches(ByteWindows(text, 16), batch_size=4, seed=1)


def test_one_rank_is_plain_sgd_and_resumes_bit_for_bit(
    world: World, tmp_path: Path, reported: list[tuple[int, dict[str, float]]]
) -> None:
    arguments = [*TINY, "--steps", "8", "--checkpoint-every", "4"]
    arguments += ["--checkpoint-dir", str(tmp_path)]
    settings = load_settings(arguments, {})
    whole = Trainer(settings, world)
    whole.run()
    steps = [metrics for _, metrics in reported if "loss" in metrics]
    model = build_model(settings)
    plain = _plain_sgd(model, list(itertools.islice(_batches(), 8)))
    assert [metrics["loss"] for metrics in steps] == plain
    assert [metrics["read_version"] for metrics in steps] == list(range(8))
    assert [metrics["staleness"] for metrics in steps] == [0] * 8

    shutil.rmtree(tmp_path / "step-00000008")
    reported.clear()
    Trainer(settings, world).run()
    assert [metrics["loss"] for _, metrics in reported if "loss" in metrics] == plain[4:]


def _plain_sgd(model: torch.nn.Module, batches: list[Sample]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    losses = []
    for bytes_BT, next_BT in batches:
        loss = next_byte_loss(model(bytes_BT), next_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_memory_has_no_name_once_it_is_shared(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hogwild, "MEMORY", str(tmp_path))
    memory = hogwild.share_memory(1000)
    assert memory.shape == (1000,)
    assert not memory.any()
    assert not list(tmp_path.iterdir())


def test_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="memory of one host, which has 2 of 4 ranks") as raised:
        load_settings(["--strategy", "hogwild"], {}, world_size=4)
    assert raised.value.name == "strategy"
    load_settings(["--strategy", "hogwild"], {}, world_size=2)


def test_a_rank_that_does_not_see_the_file_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hogwild, "_make_file", lambda num_bytes: "/of/another/host")
    with pytest.raises(SettingError, match="does not see /of/another/host of rank 0"):
        hogwild.share_memory(1000)
