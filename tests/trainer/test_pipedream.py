"""PipeDream on three stages: the versions that each microbatch meets, and what comes of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

from rankscope_trainer import report
from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import next_byte_loss
from rankscope_trainer.settings import Settings, load_settings
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import Message
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import join_world
from tests.trainer.launch import Finished, run

STAGES = 3
STEPS = 10
SAVED = 5  # the pipeline runs empty after this step
MICROBATCHES = {"stashing": 2, "naive": 1}
RUNS = {
    "stashing": "--microbatches 2 --validate-every 4 --validate-batches 2",
    "naive": "--no-weight-stashing --clip 0.7",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the ranks: sums come in the same order, and a busy machine is not kept busier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Each run once, from the first step to the last, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("pipedream")
    return functools.cache(lambda name: _run(folder / name, name))


def _run(folder: Path, name: str) -> Finished:
    arguments = [*RUNS[name].split(), "--strategy", "pipedream", "--steps", str(STEPS)]
    arguments += ["--versions", str(folder / "versions.jsonl")]
    arguments += ["--checkpoint-dir", str(folder / "checkpoints")]
    finished = run(folder, STAGES, *arguments, "--checkpoint-every", str(SAVED))
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
    batches = iter(_batches(settings, num_stages))
    for step in range(1, settings.steps + 1):
        found = []
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
            found.append(loss.item())
        losses[step] = sum(found) / len(found)
        if step == saved:
            first = number
    return losses


def _batches(settings: Settings, num_stages: int) -> Batches:
    text = read_standard_library(settings.data_bytes)
    windows = ByteWindows(split_text(text, settings.validation_ratio)[0], settings.context)
    batch_size = settings.batch_size * settings.microbatches_for(num_stages)
    return Batches(windows, batch_size=batch_size, seed=settings.seed)


def _settings(finished: Finished) -> Settings:
    return load_settings(finished.arguments, {}, STAGES)


def _versions(folder: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by stage and microbatch the versions of its forward and its backward."""
    lines = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    found = {
        (line["stage"], line["microbatch"]): (line["forward_version"], line["backward_version"])
        for line in lines
    }
    assert len(found) == len(lines), "a microbatch was counted twice"
    return found


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
    _check_traffic(runs(name), resumed_after=0)


@pytest.mark.multiproc
def test_a_resumed_run_goes_on_bit_for_bit(runs: Callable[[str], Finished], tmp_path: Path) -> None:
    original = runs("stashing")
    checkpoint = Path("checkpoints", f"step-{SAVED:08d}")
    shutil.copytree(original.folder / checkpoint, tmp_path / checkpoint)
    resumed = _run(tmp_path, "stashing")
    expected = {step: loss for step, loss in original.losses().items() if step > SAVED}
    assert resumed.losses() == expected  # exactly
    versions = _versions(original.folder)
    assert _versions(tmp_path) == {
        key: found for key, found in versions.items() if key[1] >= SAVED * MICROBATCHES["stashing"]
    }
    for rank in range(STAGES):
        last = Path("checkpoints", f"step-{STEPS:08d}", f"rank-{rank}.pt")
        one, other = (torch.load(f / last, weights_only=True) for f in (original.folder, tmp_path))
        assert one["strategy"] == {"step": STEPS, "version": STEPS * MICROBATCHES["stashing"]}
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    _check_traffic(resumed, resumed_after=SAVED)


def _check_traffic(finished: Finished, *, resumed_after: int) -> None:
    settings = _settings(finished)
    for rank in range(STAGES):
        by_step = finished.operations(rank)
        counted = {
            step: Counter(Message(*operation) for operation in by_step.get(step, []))
            for step in {0, *by_step}
        }
        assert counted == expected_traffic(
            settings, rank=rank, world_size=STAGES, resumed_after=resumed_after
        )


def test_one_stage_is_plain_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(report, "_log_metrics", lambda step, **metrics: told.append(metrics))
    arguments = ["--strategy", "pipedream", "--layers", "2", "--width", "16", "--heads", "2"]
    arguments += ["--context", "16", "--data-bytes", "20000", "--steps", "6", "--device", "cpu"]
    settings = load_settings([*arguments, "--clip", "0.8"], {})
    world = join_world(device="cpu", timeout_seconds=30)
    try:
        Trainer(settings, world).run()
    finally:
        dist.destroy_process_group()
    told = [metrics for metrics in told if "loss" in metrics]  # not what else is told
    assert [metrics["loss"] for metrics in told] == list(simulate(settings, 1, 0).values())
    for name in ("forward_version", "backward_version"):
        assert [metrics[name] for metrics in told] == [0, 1, 2, 3, 4, 5]


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(SettingError, match="2 layers cannot fill 3 stages"):
        load_settings(["--strategy", "pipedream", "--layers", "2"], {}, 3)
