"""TRL's SFTTrainer on two ranks, unchanged: what is seen is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.others import PYTHON
from tests.scenarios.launched import cells, launch, operations, phases_add_up
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("others")]
SCRIPT = str(Path(__file__).with_name("third_party") / "trl_sft.py")
STEPS = 12  # of the script


def test_supervised_fine_tuning(tmp_path: Path, shared_server: ServerProcess) -> None:
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = launch(
        shared_server, tmp_path, *torchrun, SCRIPT, str(tmp_path / "out"), HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert run.get()["run"]["name"] == "trl_sft.py"
    assert {row["exit_text"] for row in run.ranks()} == {"ended cleanly"}
    for rank in (0, 1):
        steps = cells(run, rank)
        assert len(steps) == STEPS
        assert all(map(phases_add_up, steps))
        for step in steps[1:]:
            named = ("data", "forward", "backward", "optimizer")
            assert all(step["phases"][name] > 0 for name in named), step
        assert operations(run, rank)["all_reduce"] >= STEPS
    (loss,) = (one for one in run.get()["numbers"] if one["key"] == "loss")
    assert loss["reference_text"].endswith("as the framework logs it")
    printed = re.findall(r"'loss': '?([\d.]+)", run.log.read_text(errors="replace"))
    assert loss["value"] == pytest.approx(float(printed[-1]), rel=0.01)
