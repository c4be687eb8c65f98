"""Megatron-core's own groups and layers on four ranks: they are seen as the mesh that they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.others import PYTHON
from tests.scenarios.launched import cells, launch
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("others")]
SCRIPT = str(Path(__file__).with_name("third_party") / "megatron_layers.py")
STEPS = 24  # of the script


def test_megatron(tmp_path: Path, shared_server: ServerProcess) -> None:
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    run = launch(shared_server, tmp_path, *torchrun, SCRIPT, seconds=400)
    assert {row["exit_text"] for row in run.ranks()} == {"ended cleanly"}
    assert [len(cells(run, rank)) for rank in range(4)] == [STEPS] * 4
    parallelism = run.get("/parallelism")
    assert parallelism["mesh"]["text"] == "4 ranks as data 2 × tensor 2"  # noqa: RUF001
    assert parallelism["mesh"]["at"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    calls = {
        each["name"]: (each["num_groups"], each["descriptions"], each["num_calls"])
        for each in parallelism["families"]
    }
    # forward of the cut rows, backward of the cut columns; gradients of four parameters
    assert calls == {
        "tensor": (2, ["TENSOR_MODEL_PARALLEL_GROUP"], 4 * STEPS * 2),
        "data": (2, ["DATA_PARALLEL_GROUP"], 4 * STEPS * 4),
    }
