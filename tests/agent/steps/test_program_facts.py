"""What a rank says of its program: data set, seed, type, command, pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rankscope.process import environment
from rankscope.wire import schema
from tests.agent.steps.programs import data, loss_of, net
from tests.agent.watching import Watching


class Counted(Dataset[torch.Tensor]):
    """A data set that counts how often it was asked for its length."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


class Endless(IterableDataset[torch.Tensor]):
    """A stream whose length nobody may ask for."""

    def __len__(self) -> int:
        raise AssertionError("asked for a length")

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(6, 4)


class OwnOrder(torch.utils.data.Sampler[int]):
    """A sampler of the user's: it may know an order without knowing the length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)


def train(loader: DataLoader[torch.Tensor]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def newest(watching: Watching) -> dict[str, str]:
    return dict(watching.of(schema.Environment)[-1].facts)


def test_after_the_first_step_the_program_is_described_once(watching: Watching) -> None:
    torch.manual_seed(1234)
    train(DataLoader(Counted(), batch_size=4))
    assert len(watching.of(schema.Environment)) == 1
    facts = newest(watching)
    assert facts["dataset.type"] == "Counted"
    assert facts["dataset.length"] == "24"
    assert facts["torch.seed"] == "1234"
    assert facts["torch.dtype"] == "float32"
    assert facts["torch.deterministic"] == "False"
    assert facts["command.hash"] == environment.command_hash(
        environment.command(environment.own_command())
    )


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_nobody_is_asked_for_a_length_that_the_loader_does_not_need(
    watching: Watching, kind: str
) -> None:
    counted = Counted()
    train(
        DataLoader(Endless(), batch_size=2) if kind == "stream"
        else DataLoader(counted, batch_size=2, sampler=OwnOrder())
    )  # fmt: skip
    assert counted.asked == 0
    facts = newest(watching)
    assert facts["dataset.type"] == ("Endless" if kind == "stream" else "Counted")
    assert "dataset.length" not in facts


def test_a_script_without_loader_is_described_too(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in data(3):
        loss_of(model, x, y).backward()
        optimizer.step()
    facts = newest(watching)
    assert "dataset.type" not in facts
    assert facts["torch"] == torch.__version__


def test_code_is_that_of_the_main_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    main, script = sys.modules["__main__"], str(tmp_path / "train.py")
    monkeypatch.setattr(main, "__file__", script, raising=False)  # a worker of xdist has none
    environment._program_facts.cache_clear()
    facts = environment.snapshot({})
    environment._program_facts.cache_clear()
    assert facts["code.script"] == "train.py"
    assert len(facts["code.hash"]) == 12


ALIKE = [
    ("train.py --lr 0.1 --rank 0", "train.py --lr 0.1 --rank 3"),
    ("train.py --local_rank=0 -x", "train.py --local_rank=1 -x"),
    ("/a/train.py --data /scratch/n0", "/b/train.py --data /scratch/n1"),
    ("train.py --master-addr h0 --lr 0.1", "train.py --master-addr h1 --lr 0.1"),
    ("train.py data=/mnt/a", "train.py data=/mnt/b"),
]
OTHER = [
    ("train.py --lr 0.1", "train.py --lr 0.2"),
    ("train.py --bf16", "train.py"),
    ("train.py model=gpt2", "train.py model=llama"),
    ("train.py --lr=0.1", "train.py --lr=0.01"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_commands_that_differ_by_rank_or_host_are_alike(one: str, other: str) -> None:
    hashes = [environment.command_hash(["python", *text.split()]) for text in (one, other)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_commands_that_set_something_else_are_not(one: str, other: str) -> None:
    hashes = [environment.command_hash(["python", *text.split()]) for text in (one, other)]
    assert hashes[0] != hashes[1]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_pipeline_tells_its_schedule(watching: Watching) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, n_microbatches=6, loss_fn=nn.functional.mse_loss)
    ScheduleGPipe(stage, n_microbatches=2)  # for evaluation
    last = watching.of(schema.RankRegistered)[-1]
    assert (last.schedule, last.num_microbatches) == ("ScheduleGPipe", 6)
    assert (last.stage, last.num_stages, last.num_local_stages) == (0, 1, 1)


@pytest.mark.usefixtures("alone")
def test_a_rank_with_several_stages_stands_where_its_first_one_does(watching: Watching) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    stages = [PipelineStage(nn.Linear(4, 4), index, 2, torch.device("cpu")) for index in (1, 0)]
    ScheduleInterleaved1F1B(stages[::-1], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    last = watching.of(schema.RankRegistered)[-1]
    assert (last.stage, last.num_stages, last.num_local_stages) == (0, 2, 2)
    assert (last.schedule, last.num_microbatches) == ("ScheduleInterleaved1F1B", 4)


def test_text_that_is_no_utf_8_is_recorded(watching: Watching) -> None:
    name = os.fsdecode(b"\xff.bin")
    watching.context.log_line(30, name, fields={name: name})
    watching.context.error("OSError", name, traceback=name)
    (line,), (error,) = watching.of(schema.LogLine), watching.of(schema.ErrorRaised)
    assert (line.message, line.fields) == ("?.bin", {"?.bin": "?.bin"})
    assert (error.message, error.traceback) == ("?.bin", "?.bin")


@pytest.mark.parametrize(
    ("command", "rate"),
    [
        ("train.py --lr 1e-3 --epochs 3", 1e-3),
        ("train.py --learning-rate=0.5 --min-lr 0.1 --lr-decay 0.9", 0.5),
        ("train.py optimizer.lr=3e-4 --lr-decay 2", 3e-4),
        ("train.py --optim.base_lr 2", 2.0),
        ("train.py --lr 1e-3 --max-lr 1e-3", 1e-3),
        ("train.py --lr 1e-3 --max-lr 2e-3", None),
        ("train.py --lr", None),
        ("train.py --lr auto", None),
        ("train.py lr 3", None),
        ("train.py --color 3", None),
    ],
)
def test_the_rate_that_a_command_line_gives(command: str, rate: float | None) -> None:
    assert environment.given_rate(command.split()) == rate
