"""A run that continues with another number of ranks trains what it would have trained without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rankscope_trainer.checkpoint_folder import finished
from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from tests.trainer.launch import run
from tests.trainer.whole_runs import (
    assert_traffic_as_computed,
    losses_of_windows,
    run_in_turns,
    train_alone,
)

STEPS_BETWEEN = 3
FSDP = "--strategy fsdp --batch-size 2 --global-batch 12 --clip 0.5"


def position(folder: Path) -> int:
    document = json.loads((finished(folder / "checkpoints")[-1] / "checkpoint.json").read_text())
    drawn: int = document["position"]
    return drawn


def assert_close(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Sums are added up in another order, and AdamW divides by their roots."""
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-5)


@pytest.mark.multiproc
@pytest.mark.parametrize("sizes", [(2, 3, 1, 2), (1, 3, 2)])
def test_sharded_weights_are_cut_anew(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    runs = run_in_turns(tmp_path, FSDP, sizes, STEPS_BETWEEN)
    steps = STEPS_BETWEEN * len(sizes)
    alone = load_settings(
        [*runs[-1].arguments, "--strategy", "ddp", "--global-batch", "0", "--microbatches", "6"], {}
    )
    losses, model = train_alone(alone, 1)
    found = runs[-1].losses()  # the file of all of them
    assert list(found) == list(range(1, steps + 1))
    for step, loss in found.items():  # with more ranks the first reports that of its own shard
        if sizes[(step - 1) // STEPS_BETWEEN] == 1:
            assert loss == pytest.approx(losses[step], rel=2e-5)
    dcp_to_torch_save(finished(tmp_path / "checkpoints")[-1] / "sharded", tmp_path / "whole.pt")
    assert_close(torch.load(tmp_path / "whole.pt", weights_only=True)["model"], model)
    assert position(tmp_path) == 12 * steps
    assert_traffic_as_computed(runs[-1], sizes[-1], resumed_after=steps - STEPS_BETWEEN)


@pytest.mark.multiproc
@pytest.mark.parametrize("sizes", [(2, 3, 1), (4, 1)])
def test_replicas_of_a_ring_become_more_and_fewer(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Of four ranks two have a microbatch more than the others."""
    flags = "--strategy ring --batch-size 2 --global-batch 12"
    runs = run_in_turns(tmp_path, flags, sizes, STEPS_BETWEEN)
    windows = losses_of_windows(load_settings(runs[-1].arguments, {}, 1), 12)
    expected = {}
    for step, losses in windows.items():  # windows are dealt out like cards
        own = losses[:: sizes[(step - 1) // STEPS_BETWEEN]]
        expected[step] = sum(own) / len(own)
    found = runs[-1].losses()
    even = [step for step in expected if 6 % sizes[(step - 1) // STEPS_BETWEEN] == 0]
    assert [found[step] for step in even] == pytest.approx(
        [expected[step] for step in even], rel=2e-5
    )
    assert position(tmp_path) == 12 * STEPS_BETWEEN * len(sizes)
    assert_traffic_as_computed(runs[-1], 1, resumed_after=(len(sizes) - 1) * STEPS_BETWEEN)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("flags", "ranks", "shards", "axes"),
    [
        ("--strategy tensor --clip 0.5", (2, 1, 4), 1, ()),
        ("--strategy tensor --sequence-parallel", (1, 2), 1, ()),
        ("--strategy hybrid", (4, 2, 4), 2, ("2 2 1", "2 1 1", "2 1 2")),
    ],
    ids=["tensor", "sequence", "hybrid"],
)
def test_layers_are_cut_anew(
    tmp_path: Path, flags: str, ranks: tuple[int, ...], shards: int, axes: tuple[str, ...]
) -> None:
    """A hybrid keeps its shards of the data, and so its batch."""
    names = ("data", "pipeline", "tensor")
    more = [
        " ".join(f"--{n}-parallel {size}" for n, size in zip(names, each.split(), strict=True))
        for each in axes
    ]
    runs = run_in_turns(tmp_path, flags, ranks, STEPS_BETWEEN, more)
    settings = load_settings(runs[-1].arguments, {}, ranks[-1])
    losses, _ = train_alone(settings, ranks[-1], shards)
    assert runs[-1].losses() == pytest.approx(losses, rel=2e-5)  # the file of all of them
    batch = settings.batch_size * settings.microbatches_for(ranks[-1]) * shards
    assert position(tmp_path) == batch * settings.steps
    assert_traffic_as_computed(runs[-1], ranks[-1], resumed_after=settings.steps - STEPS_BETWEEN)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--strategy pipeline --schedule gpipe --microbatches 6 --clip 0.5", (2, 3, 1, 2)),
        ("--strategy pipeline --schedule interleaved --layers 6 --microbatches 6", (2, 3, 2)),
        ("--strategy pipeline --microbatches 4 --optimizer sgd --mask-buffer", (1, 2)),
        ("--strategy model_parallel --batch-size 8", (3, 1, 2)),
    ],
    ids=["gpipe", "interleaved", "1f1b", "model_parallel"],
)
def test_stages_are_cut_anew(tmp_path: Path, flags: str, sizes: tuple[int, ...]) -> None:
    runs = run_in_turns(tmp_path, flags, sizes, STEPS_BETWEEN)
    settings = load_settings(runs[-1].arguments, {}, sizes[-1])
    losses, _ = train_alone(settings, sizes[-1])
    assert runs[-1].losses() == pytest.approx(losses, rel=2e-5)  # the file of all of them
    batch = settings.batch_size * settings.microbatches_for(sizes[-1])
    assert position(tmp_path) == batch * settings.steps
    assert_traffic_as_computed(runs[-1], sizes[-1], resumed_after=settings.steps - STEPS_BETWEEN)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "flags", ["--exchange messages --clip 0.5", "--exchange calls --optimizer sgd"]
)
def test_servers_share_the_weights_anew(tmp_path: Path, flags: str) -> None:
    """Two workers throughout; their servers are one, two with uneven shares, and one again."""
    flags, workers = f"--strategy parameter_server {flags}", 2
    servers = ["--servers 1", "--servers 2 --server-shares 3,1", "--servers 1"]
    runs = run_in_turns(tmp_path, flags, (3, 4, 3), STEPS_BETWEEN, servers)
    losses, _ = train_alone(load_settings(runs[-1].arguments, {}, 3), workers, workers)
    assert runs[-1].losses() == pytest.approx(losses, rel=2e-5)
    assert_traffic_as_computed(runs[-1], 3, resumed_after=2 * STEPS_BETWEEN)


@pytest.mark.multiproc
def test_servers_that_do_not_wait_for_all_stay_as_they_are(tmp_path: Path) -> None:
    flags = "--strategy parameter_server --consistency async --checkpoint-every 2"
    flags += f" --checkpoint-dir {tmp_path / 'checkpoints'}"
    assert run(tmp_path, 2, *flags.split(), "--steps", "2").code == 0
    refused = run(tmp_path, 3, *flags.split(), "--steps", "4")
    assert refused.code != 0
    assert "was written with servers = 'rank 1:" in refused.output


@pytest.mark.multiproc
def test_what_belongs_to_a_rank_is_refused_with_the_reason(tmp_path: Path) -> None:
    flags = "--strategy local_sgd --checkpoint-every 2"
    flags += f" --checkpoint-dir {tmp_path / 'checkpoints'}"
    assert run(tmp_path, 1, *flags.split(), "--steps", "2").code == 0
    refused = run(tmp_path, 2, *flags.split(), "--steps", "4")
    assert refused.code != 0
    assert "world_size = 1, not 2, and local_sgd holds what belongs to each rank" in refused.output


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        (FSDP, 4, "not equally many on 4 ranks"),
        (FSDP.replace("fsdp", "tensor"), 2, "choose ddp, fsdp or ring"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(flags: str, ranks: int, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        load_settings(flags.split(), {}, ranks)
