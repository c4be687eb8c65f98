"""PipeDream on three stages: the versions that each microbatch meets, and what comes of them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
    batches_of_shards,
)

STAGES = 3
STEPS = 10
SAVED = 5  # the pipeline runs empty after this step
MICROBATCHES = {"stashing": 2, "naive": 1}
RUNS = {
    "stashing": "--microbatches 2 --validate-every 4 --validate-batches 2",
    "naive": "--no-weight-stashing --clip 0.7",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Each run once, from the first step to the last, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("pipedream")
    return functools.cache(lambda name: _run(folder / name, name))


def _run(folder: Path, name: str) -> Finished:
    arguments = f"--strategy pipedream {RUNS[name]} --versions {folder / 'versions.jsonl'}"
    finished = run(folder, STAGES, *with_checkpoints(folder, arguments, steps=STEPS, every=SAVED))
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    return finished


def simulate(settings: Settings, num_stages: int, saved: int) -> dict[int, float]:
    """Train in this process, one microbatch after the other, with the versions of the papers.

    Stage i computes microbatch n forward with the weights after update n - (p-1-i), and backward
    with the same or, without stashing, with those after update n.
    """
    names = [
        [name for name, _ in build_model(settings).keep_stage(i, num_stages).named_parameters()]
        for i in range(num_stages)
    ]
    model = build_model(settings)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    history: list[dict[str, torch.Tensor]] = []  # the weights of each version
    first = number = 0
    losses: dict[int, float] = {}
    batches = iter(batches_of_shards(settings, num_stages, 1)[0])
    for step in range(1, settings.steps + 1):
        step_losses = []
        for inputs, targets in zip(
            *(half.split(settings.batch_size) for half in next(batches)), strict=True
        ):
            history.append({name: p.detach().clone() for name, p in parameters.items()})
            used = {
                name: history[max(first, number - (num_stages - 1 - stage))][name]
                .clone()
                .requires_grad_()
                for stage in range(num_stages)
                for name in names[stage]
            }
            loss = next_byte_loss(functional_call(model, used, (inputs,)), targets)
            if not settings.weight_stashing:
                for name, tensor in used.items():
                    tensor.data.copy_(history[number][name])
            loss.backward()
            for stage in range(num_stages):
                for name in names[stage]:
                    parameters[name].grad = used[name].grad
                if settings.clip:
                    part = [parameters[name] for name in names[stage]]
                    torch.nn.utils.clip_grad_norm_(part, settings.clip)
            optimizer.step()
            number += 1
            step_losses.append(loss.item())
        losses[step] = sum(step_losses) / len(step_losses)
        if step == saved:
            first = number
    return losses


def _settings(finished: Finished) -> Settings:
    return load_settings(finished.arguments, {}, STAGES)


def _versions(folder: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by stage and microbatch the versions of its forward and its backward."""
    lines = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    versions = {
        (line["stage"], line["microbatch"]): (line["forward_version"], line["backward_version"])
        for line in lines
    }
    assert len(versions) == len(lines), "a microbatch was counted twice"
    return versions


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_every_microbatch_meets_the_versions_that_the_method_promises(
    runs: Callable[[str], Finished], name: str
) -> None:
    versions = _versions(runs(name).folder)
    microbatches = STEPS * MICROBATCHES[name]
    empty = SAVED * MICROBATCHES[name]
    assert versions.keys() == {(i, n) for i in range(STAGES) for n in range(microbatches)}
    for (stage, microbatch), (forward, backward) in versions.items():
        ahead = STAGES - 1 - stage
        since_empty = microbatch % empty
        late = microbatch - forward
        assert late == min(since_empty, ahead)  # the whole of p-1-i once the pipeline is full
        assert backward - forward == (0 if name == "stashing" else late)
    if name == "naive":
        steady = {key: b - f for key, (f, b) in versions.items() if key[1] % empty >= STAGES - 1}
        assert {stage: gap for (stage, _), gap in steady.items()} == {0: 2, 1: 1, 2: 0}
        assert all(gap == STAGES - 1 - stage for (stage, _), gap in steady.items())


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_a_simulation_with_these_versions(
    runs: Callable[[str], Finished], name: str
) -> None:
    finished = runs(name)
    expected = simulate(_settings(finished), STAGES, SAVED)
    assert finished.losses() == pytest.approx(expected, rel=2e-5)
    assert finished.losses()[STEPS] < finished.losses()[1] - 0.15
    # Weights stashed otherwise would be seen.
    other = _settings(finished)
    other = dataclasses.replace(other, weight_stashing=not other.weight_stashing)
    wrong = simulate(other, STAGES, SAVED)
    assert finished.losses() != pytest.approx(wrong, rel=1e-4)


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(
    runs: Callable[[str], Finished], name: str
) -> None:
    assert_traffic_as_computed(runs(name), STAGES)


@pytest.mark.multiproc
def test_a_resumed_run_goes_on_bit_for_bit(runs: Callable[[str], Finished], tmp_path: Path) -> None:
    original = runs("stashing")
    assert_resumes_bit_for_bit(original, STAGES, tmp_path, after=SAVED)
    versions = _versions(original.folder)
    assert _versions(tmp_path) == {
        key: used for key, used in versions.items() if key[1] >= SAVED * MICROBATCHES["stashing"]
    }
    part = tmp_path / "checkpoints" / f"step-{STEPS:08d}" / "rank-0.pt"
    state = torch.load(part, weights_only=True)["strategy"]
    assert state == {"step": STEPS, "version": STEPS * MICROBATCHES["stashing"]}


def test_one_stage_is_plain_training(
    world: World, reported: list[tuple[int, dict[str, float]]]
) -> None:
    arguments = ["--strategy", "pipedream", "--layers", "2", "--width", "16", "--heads", "2"]
    arguments += ["--context", "16", "--data-bytes", "20000", "--steps", "6", "--device", "cpu"]
    settings = load_settings([*arguments, "--clip", "0.8"], {})
    Trainer(settings, world).run()
    steps = [metrics for _, metrics in reported if "loss" in metrics]
    assert [metrics["loss"] for metrics in steps] == list(simulate(settings, 1, 0).values())
    for name in ("forward_version", "backward_version"):
        assert [metrics[name] for metrics in steps] == [0, 1, 2, 3, 4, 5]


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(SettingError, match="2 layers cannot fill 3 stages"):
        load_settings(["--strategy", "pipedream", "--layers", "2"], {}, 3)
