"""DeepSpeed's own launcher and engine, on CPUs: what is seen of its steps and collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.others import PYTHON
from tests.ports import free_port
from tests.scenarios.launched import cells, launch, operations, phases_add_up
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("others")]
SCRIPT = str(Path(__file__).with_name("third_party") / "deepspeed_zero.py")
STEPS, MICROBATCHES = 24, 2  # of the script


@pytest.mark.parametrize(
    ("stage", "operation", "each_step"),
    [
        (0, "all_reduce", 1),  # of all gradients, after the last microbatch
        (1, "all_gather_into_tensor", 1),  # of the parameters that other ranks updated
        # of gradients, in each microbatch
        (3, "reduce_scatter_tensor", MICROBATCHES),
    ],
)
def test_deepspeed(
    tmp_path: Path, shared_server: ServerProcess, stage: int, operation: str, each_step: int
) -> None:
    run = launch(
        shared_server, tmp_path, PYTHON, "-m", "deepspeed.launcher.runner", "--num_accelerators",
        "2", "--master_port", str(free_port()), SCRIPT, "--stage", str(stage), DS_ACCELERATOR="cpu",
    )  # fmt: skip
    known, ranks = run.get()["run"], run.ranks()
    assert (known["launcher"], known["name"]) == ("deepspeed", "deepspeed_zero.py")
    assert [(row["rank"], row["local_rank"], row["node_rank"]) for row in ranks] == [
        (0, 0, 0), (1, 1, 0),
    ]  # fmt: skip
    assert {row["exit_text"] for row in ranks} == {"ended cleanly"}
    for rank in (0, 1):
        steps = cells(run, rank)
        assert len(steps) == STEPS  # not one for each microbatch
        assert all(map(phases_add_up, steps))
        for phase in ("data", "forward", "backward", "optimizer"):
            assert sum(step["phases"][phase] for step in steps) > 0
        assert operations(run, rank)[operation] >= STEPS * each_step
    loss = next(one for one in run.get()["numbers"] if one["key"] == "loss")
    # what backward() is called on: DeepSpeed divides it, and 8 classes begin with log 8 = 2.08
    assert 1.5 < loss["value"] * MICROBATCHES < 2.5
