"""DDP's options: compressed gradients, a static graph, and ranks that run out of batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies.float8 import LARGEST, decode, encode
from rankscope_trainer.strategies.uneven import last_steps
from tests.trainer.launch import Finished, run, with_checkpoints
from tests.trainer.whole_runs import (
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
    train_alone,
)

pytestmark = pytest.mark.core

STEPS = 10
HALFWAY = 5
RUNS = {  # ranks, arguments
    "fp16": (2, "--comm-hook fp16"),
    "bf16": (2, "--comm-hook bf16"),
    "fp8": (3, "--comm-hook fp8"),
    "powersgd": (3, "--comm-hook powersgd"),
    "static": (2, "--static-graph"),
    "uneven": (3, "--uneven-ratio 0.4"),
    "buffers": (2, "--mask-buffer"),
    "static-buffers": (2, "--static-graph --mask-buffer"),
    "uneven-buffers": (3, "--uneven-ratio 0.4 --mask-buffer"),
}
# Relative; where nothing but the order of sums differs, the last bits do.
TOLERANCES = {
    "fp16": 1e-4,
    "bf16": 1e-3,
    "fp8": 1e-2,
    "static": 2e-5,
    "uneven": 2e-5,
    "buffers": 2e-5,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Each run once, from the first step to the last."""
    runs = {}
    for name, (ranks, arguments) in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        whole = f"--bucket-mib 0.05 {arguments}"
        flags = with_checkpoints(folder, whole, steps=STEPS, every=HALFWAY)
        runs[name] = run(folder, ranks, *flags)
    return runs


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_the_loss_is_that_of_a_single_process_or_falls(
    runs: dict[str, Finished], name: str
) -> None:
    finished = runs[name]
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output
    losses = finished.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.3
    ranks = RUNS[name][0]
    expected, _ = train_alone(load_settings(finished.arguments, {}, ranks), ranks, ranks)
    if name in TOLERANCES:
        assert losses == pytest.approx(expected, rel=TOLERANCES[name])
    if name in ("fp16", "bf16", "fp8", "powersgd"):
        assert losses != pytest.approx(expected, rel=1e-7)  # the hook really was at work


@pytest.mark.multiproc
@pytest.mark.parametrize("name", RUNS)
def test_traffic_of_each_step_is_the_computed_one(runs: dict[str, Finished], name: str) -> None:
    assert_traffic_as_computed(runs[name], RUNS[name][0])


@pytest.mark.multiproc
def test_compressed_gradients_are_smaller(runs: dict[str, Finished]) -> None:
    sizes = {}
    for name in ("static", "fp16", "bf16", "powersgd", "fp8"):
        sent = runs[name].operations(0)[STEPS - 1]
        sizes[name] = sum(size for operation, size in sent if operation.startswith("all_"))
    assert sizes["fp16"] == sizes["bf16"] == sizes["static"] // 2
    assert sizes["powersgd"] < sizes["static"] / 4
    ranks = RUNS["fp8"][0]  # a byte to each, and one of its piece
    assert sizes["fp8"] == pytest.approx(sizes["static"] / 4 * (ranks + 1) / ranks, rel=0.01)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name", ["powersgd", "fp8", "static", "uneven", "buffers", "static-buffers", "uneven-buffers"]
)
def test_a_resumed_run_goes_on_bit_for_bit(
    runs: dict[str, Finished], name: str, tmp_path: Path
) -> None:
    assert_resumes_bit_for_bit(runs[name], RUNS[name][0], tmp_path, after=HALFWAY)


@pytest.mark.multiproc
def test_errors_of_powersgd_are_those_of_each_rank(runs: dict[str, Finished]) -> None:
    """Without them in the checkpoint, resuming could not be exact."""
    folder = runs["powersgd"].folder / "checkpoints" / f"step-{STEPS:08d}"
    states = [torch.load(folder / f"rank-{rank}.pt")["strategy"] for rank in range(3)]
    assert states[0]["iter"] == STEPS
    assert states[0]["errors"].keys() == states[1]["errors"].keys() != set()
    assert not torch.equal(states[0]["errors"][0], states[1]["errors"][0])
    assert torch.equal(states[0]["qs"][0], states[1]["qs"][0])


@pytest.mark.multiproc
def test_errors_of_eight_bits_are_those_of_each_rank(runs: dict[str, Finished]) -> None:
    folder = runs["fp8"].folder / "checkpoints" / f"step-{STEPS:08d}"
    states = [torch.load(folder / f"rank-{rank}.pt")["strategy"] for rank in range(3)]
    for name in ("errors", "piece_errors"):
        assert states[0][name].keys() == states[1][name].keys() != set()
        assert not torch.equal(states[0][name][0], states[1][name][0])


def test_eight_bits_keep_four_of_precision_whatever_the_scale() -> None:
    numbers = torch.randn(3, 1000) * torch.tensor([[1e-12], [1.0], [1e12]])
    numbers[:, 0] = 0.0
    messages = encode(numbers)
    assert (messages.dtype, messages.shape) == (torch.uint8, (3, 4 + 1000))
    error = (decode(messages) - numbers).abs()
    smallest = (
        numbers.abs().amax(1, keepdim=True) / LARGEST * 2.0**-6
    )  # below it the steps are even
    assert bool((error <= numbers.abs().maximum(smallest) * 2.0**-4).all())
    assert not decode(encode(torch.zeros(2, 5))).any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_eight_bits_do_not_hide_that_a_gradient_is_no_number(wrong: float) -> None:
    assert decode(encode(torch.tensor([[1.0, wrong, 2.0]]))).isnan().any()


@pytest.mark.multiproc
def test_no_checkpoint_is_written_once_a_rank_is_out_of_batches(runs: dict[str, Finished]) -> None:
    folder = runs["uneven"].folder / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == [f"step-{HALFWAY:08d}"]
    settings = load_settings(runs["uneven"].arguments, {}, 3)
    assert last_steps(settings, 3) == [10, 8, 6]


@pytest.mark.parametrize(
    ("ratio", "ranks", "expected"),
    [("0", 3, [10, 10, 10]), ("0.5", 1, [10]), ("0.99", 2, [10, 1]), ("0.25", 3, [10, 9, 8])],
)
def test_ranks_run_out_one_after_the_other(ratio: str, ranks: int, expected: list[int]) -> None:
    settings = load_settings(["--steps", "10", "--uneven-ratio", ratio], {}, ranks)
    assert last_steps(settings, ranks) == expected


@pytest.mark.parametrize(
    "other",
    [["--comm-hook", "fp16"], ["--static-graph"], ["--strategy", "ring"]],
    ids=["hook", "static", "ring"],
)
def test_uneven_data_is_refused_where_it_would_be_wrong(other: list[str]) -> None:
    with pytest.raises(SettingError, match="uneven_ratio"):
        load_settings(["--uneven-ratio", "0.2", *other], {}, 2)
