"""Each strategy of the reference trainer takes a step on this version of PyTorch.

On 2.6 it may be refused, by an error that names the setting; on a newer one that is a failure.

Collected by `tests/versions.py` alone: the strategies have tests of their own on the version that
the project is developed with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankscope_trainer.errors import EXIT_USAGE
from rankscope_trainer.strategies import STRATEGIES

RANKS = 4
MORE = {"hybrid": ("--data-parallel", "1")}  # stages and parts of layers are what is asked here


@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"trainer-{strategy}")
def test_strategy(strategy: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(RANKS), "-m", "rankscope_trainer", "--strategy", strategy, "--steps", "2",
            *MORE.get(strategy, ()),
        ],
        cwd=tmp_path, env=os.environ | {"RANKSCOPE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    refused = [line for line in done.stderr.splitlines() if line.startswith("rankscope_trainer: ")]
    is_old = torch.__version__.startswith("2.6.")  # a newer one runs them all
    if is_old and refused and f"exitcode  : {EXIT_USAGE}" in done.stderr:
        pytest.skip(refused[0].partition(": ")[2])
    assert done.returncode == 0, done.stderr[-3000:]
