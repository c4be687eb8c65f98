"""Programs as their users write them, unchanged: each must give a complete run page.

They know nothing of the agent; it is attached by `rankscope run` alone.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import fork_server
from tests.scenarios.launched import PYTHON, TORCHRUN, cells, launch, operations, phases_add_up
from tests.server.conftest import ServerProcess

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Program:
    """A program, and what its own text says that it does."""

    script: str
    needs: str
    launcher: tuple[str, ...]
    steps: int  # of the optimizer
    all_reduces: int  # of DDP's gradients, one bucket each
    evaluated_after: tuple[int, ...]  # optimizer steps
    saved_after: tuple[int, ...]  # the same, where rank 0 wrote a checkpoint
    has_loader: bool = True
    framework_reduces: bool = False  # for itself, as often as it likes


PROGRAMS = (
    Program("huggingface_trainer.py", "transformers", TORCHRUN, 12, 12, (6,), (6,)),
    Program(
        "lightning_ddp.py", "lightning", (PYTHON,), 20, 20, (10,), (10,), framework_reduces=True
    ),
    Program("accelerate_loop.py", "accelerate", TORCHRUN, 24, 24, (12,), (12,)),
    Program("small_gpt.py", "torch", TORCHRUN, 12, 12, (4, 8), (4, 8), has_loader=False),
)
LOGS_LOSS = ("transformers", "lightning")


@pytest.fixture(scope="module")
def server(shared_server: ServerProcess) -> ServerProcess:
    return shared_server


@pytest.mark.multiproc
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.script)
def test_a_complete_run_page(tmp_path: Path, server: ServerProcess, program: Program) -> None:
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"needs {program.needs}")
    out = tmp_path / "out"
    out.mkdir()
    command = (*program.launcher, str(HERE / program.script), str(out))
    run = launch(server, tmp_path, *command, **fork_server.under_torchrun())

    ranks = run.ranks()
    assert [row["rank"] for row in ranks] == [0, 1]
    assert {row["exit_text"] for row in ranks} == {"ended cleanly"}
    assert run.get()["run"]["world_size"] == 2
    assert run.get()["run"]["name"] == program.script
    for rank in (0, 1):
        steps = cells(run, rank)
        assert len(steps) == program.steps
        assert all(phases_add_up(step) for step in steps)
        named = ["forward", "backward", "optimizer", *["data"] * program.has_loader]
        for step in steps[1:]:
            assert all(step["phases"][name] > 0 for name in named), step
        # what is done after step n is a part of step n + 1
        if rank == 0:
            for phase, after in (
                ("evaluation", program.evaluated_after),
                ("checkpoint", program.saved_after),
            ):
                found = [step["step"] - 1 for step in steps[1:] if step["phases"][phase] > 0]
                assert found == list(after), phase
        reduced = operations(run, rank)["all_reduce"]
        assert reduced == program.all_reduces or (
            program.framework_reduces and reduced > program.all_reduces
        )
    assert operations(run, 0) == operations(run, 1)

    environment = run.get("/environment")
    assert environment["ranks"] == [0, 1]
    assert program.needs in {row["fact"] for row in environment["common"]}
    (loss,) = [one for one in run.get()["numbers"] if one["key"] == "loss"]
    assert loss["value"] > 0
    if program.needs in LOGS_LOSS:
        assert loss["reference_text"].endswith("as the framework logs it")
    printed = re.findall(r"'loss': '?([\d.]+)", run.log.read_text(errors="replace"))
    if printed:  # the Trainer's: with accumulation twice what backward() is called on
        assert loss["value"] == pytest.approx(float(printed[-1]), rel=0.01)

    said = {line["stream"] for line in run.get("/logs?limit=500")["lines"]}
    assert "stdout" in said
