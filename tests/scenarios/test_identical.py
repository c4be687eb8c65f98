"""Training with the agent computes bit for bit what training without it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agent import recorded
from tests.scenarios.trainer import train
from tests.trainer.launch import SMALL

STEPS = 200
BUCKETS = ("--bucket-mib", "0.05")  # several of them


@pytest.mark.core
@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_losses_are_bit_identical(tmp_path: Path, strategy: str) -> None:
    losses = {}
    for attached in (True, False):
        path = tmp_path / f"losses-{attached}"
        train(
            tmp_path / str(attached), 2, "--strategy", strategy, "--steps", str(STEPS), *SMALL,
            *BUCKETS, "--losses", str(path), attached=attached,
        )  # fmt: skip
        losses[attached] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(losses[True]) == STEPS
    assert losses[True] == losses[False]
    assert len({line["loss"] for line in losses[True]}) > STEPS / 2  # it really trains
    with_agent = recorded.read(tmp_path / "True")
    assert [len(rank.steps) for rank in with_agent] == [STEPS, STEPS]
    assert not recorded.read(tmp_path / "False")
