"""Programs that end before their first step, as their users start them: what the headline says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.launched import PYTHON, launch
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
SCRIPTS = {
    "argument": (
        "import argparse\n"
        "parser = argparse.ArgumentParser(prog='train.py')\n"
        "parser.add_argument('--lr', required=True)\n"
        "parser.parse_args()\n",
        "train.py: error: the following arguments are required: --lr",
    ),
    "exit": (
        "import sys\nsys.exit('train.py: set DATA_DIR to the folder of the data first')\n",
        "train.py: set DATA_DIR to the folder of the data first",
    ),
    "file": (
        "open('/nowhere/train.bin', 'rb')\n",
        "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/train.bin'",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_line_that_says_why_is_the_headline(
    tmp_path: Path, server: ServerProcess, name: str
) -> None:
    text, said = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(text)
    run = launch(server, tmp_path, *TORCHRUN, str(script), code=1)
    verdict = run.until(lambda: run.get().get("verdict"), 20)
    assert verdict["kind"] == "failed_start"
    assert " ended before " in verdict["what"]
    assert verdict["what"].endswith(said)


def test_a_setting_that_the_trainer_refuses_is_the_headline(
    tmp_path: Path, server: ServerProcess
) -> None:
    trainer = ("-m", "rankscope_trainer", "--strategy", "tensor")
    run = launch(server, tmp_path, *TORCHRUN, *trainer, code=1)
    verdict = run.until(lambda: run.get().get("verdict"), 20)
    assert verdict["kind"] == "failed_start"
    assert "setting `heads`: 3 ranks cannot share 4 heads evenly" in verdict["what"]
    assert run.get()["answer"]["text"] == verdict["what"]
