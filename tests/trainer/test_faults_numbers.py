"""Faults that change numbers: losses, gradients and weights, compared with an undisturbed run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Sample
from rankscope_trainer.faults.fault import FaultContext, Place
from rankscope_trainer.faults.numbers import flip_bit
from rankscope_trainer.train import Trainer, build_faults
from rankscope_trainer.world import World
from tests.trainer.launch import read_manifest, run

WATCHED_TRAINER = Path(__file__).with_name("watched_trainer.py")
SMALL = "--layers 1 --width 16 --heads 2 --context 16 --data-bytes 20000 --device cpu".split()


class Run:
    """A run in this process: the losses, weights and gradients of each step."""

    def __init__(self, world: World, folder: Path, *arguments: str) -> None:
        folder.mkdir()
        self.folder = folder
        files = ["--losses", str(folder / "losses"), "--fault-manifest"]
        files += [str(folder / "manifest.jsonl")]
        settings = load_settings([*SMALL, *arguments, *files], {})
        faults = build_faults(settings)
        trainer = Trainer(faults.start(settings), world, faults)
        self.seed = trainer.settings.seed
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []  # as each step's first forward meets them
        strategy = trainer.strategy
        train_batch = strategy.train_batch

        def noting_train_batch(batch: Sample) -> torch.Tensor | None:
            named = list(strategy.model.named_parameters())
            self.weights.append({name: p.detach().clone() for name, p in named})
            return train_batch(batch)

        clip = strategy.clip

        def noting_clip(max_norm: float) -> float | None:
            named = strategy.model.named_parameters()
            self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
            return clip(max_norm)

        strategy.train_batch = noting_train_batch  # type: ignore[method-assign]
        strategy.clip = noting_clip  # type: ignore[method-assign]
        trainer.run()
        self.learning_rates = [group["lr"] for group in strategy.optimizer.param_groups]
        lines = (folder / "losses").read_text().splitlines()
        self.losses = [float.fromhex(json.loads(line)["loss"]) for line in lines]

    def end(self) -> dict[str, Any]:
        return read_manifest(self.folder)[-1]


def _differences(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> list[tuple[str, list[int], float, float]]:
    """Return each number that differs, bit for bit: where it is, and both values."""
    differences = []
    for name, tensor in one.items():
        bits, other_bits = tensor.view(torch.int32), other[name].view(torch.int32)
        for place in (bits != other_bits).nonzero().tolist():
            at = tuple(place)
            differences.append((name, place, float(tensor[at]), float(other[name][at])))
    return differences


def _flip(end: dict[str, Any]) -> list[tuple[str, list[int], float, float]]:
    before, after = float.fromhex(end["before"]), float.fromhex(end["after"])
    return [(end["tensor"], end["index"], before, after)]


def test_a_flipped_weight_is_the_one_in_the_manifest(world: World, tmp_path: Path) -> None:
    clean = Run(world, tmp_path / "clean", "--steps", "2")
    flipped = Run(
        world, tmp_path / "run", "--steps", "2", "--fault", "bitflip_weight:rank=0,start=2,steps=1"
    )
    assert _differences(clean.weights[0], flipped.weights[0]) == []
    assert _differences(clean.weights[1], flipped.weights[1]) == _flip(flipped.end())
    assert (flipped.end()["fault"], flipped.end()["fired"]) == ("bitflip_weight", 1)


@pytest.mark.parametrize("fault", ["bitflip_gradient_before", "bitflip_gradient_after"])
def test_a_flipped_gradient_is_the_one_in_the_manifest(
    fault: str, world: World, tmp_path: Path
) -> None:
    # Clipping at a huge norm changes nothing, and is where the gradients are looked at.
    common = ["--steps", "3", "--microbatches", "1", "--clip", "1e30"]
    clean = Run(world, tmp_path / "clean", *common)
    flipped = Run(
        world, tmp_path / "flipped", *common, "--fault", f"{fault}:rank=0,start=2,steps=1"
    )
    assert _differences(clean.gradients[0], flipped.gradients[0]) == []
    assert _differences(clean.gradients[1], flipped.gradients[1]) == _flip(flipped.end())
    assert flipped.losses[:2] == clean.losses[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exactly_one_bit_is_flipped_wherever_it_is(dtype: torch.dtype) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = set()
    for step in range(200):
        context = FaultContext(
            rank=0,
            world_size=1,
            step=step,
            magnitude=None,
            compute_seconds=0,
            visits=1,
            place=Place.BEFORE_FORWARD,
            sleep=lambda _: None,
        )
        tensor = torch.arange(24, dtype=torch.float64).to(dtype).reshape(4, 6).t()  # not contiguous
        before = tensor.clone()
        flip_bit(tensor, context, of="t")
        changed = before.contiguous().view(integers) ^ tensor.contiguous().view(integers)
        ((row, column),) = changed.nonzero().tolist()
        assert [row, column] == context.facts["index"]
        assert int(changed[row, column]).bit_count() == 1 or changed[row, column] < 0
        bits.add(context.facts["bit"])
    assert min(bits) == 0
    assert max(bits) == 8 * dtype.itemsize - 1


def test_nan_data_makes_everything_nan(world: World, tmp_path: Path) -> None:
    faulty = Run(
        world, tmp_path / "run", "--steps", "5", "--fault", "nan_data:rank=0,start=3,steps=1"
    )
    assert [math.isnan(loss) for loss in faulty.losses] == [False, False, True, True, True]
    assert all(weight.isnan().any() for weight in faulty.weights[3].values())
    assert (faulty.end()["fault"], faulty.end()["end_step"]) == ("nan_data", 3)


def test_exploding_loss_explodes(world: World, tmp_path: Path) -> None:
    clean = Run(world, tmp_path / "clean", "--steps", "8")
    faulty = Run(
        world, tmp_path / "run", "--steps", "8", "--fault", "exploding_loss:rank=0,start=3,steps=2"
    )
    assert faulty.losses[:3] == clean.losses[:3]
    assert faulty.losses[3] > clean.losses[3] + 2
    assert faulty.learning_rates == clean.learning_rates  # once it is over
    assert (faulty.end()["fired"], faulty.end()["end_step"]) == (2, 4)


def test_another_seed_draws_other_weights_and_other_batches(world: World, tmp_path: Path) -> None:
    clean = Run(world, tmp_path / "clean", "--steps", "2", "--seed", "5")
    other = Run(world, tmp_path / "other", "--steps", "2", "--seed", "9")
    faulty = Run(
        world, tmp_path / "run", "--steps", "2", "--seed", "5",
        "--fault", "different_seeds:rank=0,size=4",
    )  # fmt: skip
    assert faulty.losses == other.losses != clean.losses
    (begin, end) = read_manifest(faulty.folder)
    assert (begin["fault"], begin["start_step"], begin["size"]) == ("different_seeds", 0, "4")
    assert end["fired"] == 1


@pytest.mark.multiproc
def test_which_faults_make_replicas_differ(tmp_path: Path) -> None:
    """Each rank's weights and moments after each step, of four ranks with a fault on three."""
    faults = [
        "--fault", "different_seeds:rank=3",
        "--fault", "bitflip_gradient_before:rank=1,start=2,steps=1",
        "--fault", "bitflip_weight:rank=1,start=4,steps=1",
        "--fault", "bitflip_gradient_after:rank=2,start=6,steps=1",
        "--fault", "replica_drift:rank=3,start=8,steps=1",
    ]  # fmt: skip
    finished = run(tmp_path, 4, "--steps", "9", *faults, program=WATCHED_TRAINER)
    assert finished.code == 0, finished.output
    fired = [line["fault"] for line in finished.manifest() if "fired" in line]
    assert len(fired) == 5, fired
    by_rank: list[dict[int, dict[str, str]]] = []
    for rank in range(4):
        lines = (tmp_path / f"watched-{rank}.jsonl").read_text().splitlines()
        watched = [json.loads(line) for line in lines]
        by_rank.append({line["step"]: line["digest"] for line in watched if "digest" in line})
    num_different = {
        step: len({json.dumps(digests[step]) for digests in by_rank}) for step in range(1, 10)
    }
    # DDP's first broadcast hides the other seed, its reduction spreads what came before it.
    assert num_different == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4}
    flips = {line["fault"]: line for line in finished.manifest() if "tensor" in line}
    different = [name for name, digest in by_rank[0][4].items() if digest != by_rank[1][4][name]]
    assert flips["bitflip_weight"]["tensor"] in different
