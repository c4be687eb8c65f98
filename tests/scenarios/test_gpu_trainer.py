"""The trainer on one GPU over NCCL: the same command line, and times of the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.wire import schema
from tests.agent import recorded
from tests.scenarios.trainer import train

STEPS = 40


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.needs("gpu")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_device_times_are_recorded(tmp_path: Path, strategy: str) -> None:
    arguments = ["--strategy", strategy, "--device", "cuda", "--steps", str(STEPS)]
    losses = tmp_path / "losses.jsonl"
    train(tmp_path / "run", 1, *arguments, "--losses", str(losses))
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    values = [float.fromhex(line["loss"]) for line in lines]
    assert sum(values[-5:]) < sum(values[:5])
    (rank,) = recorded.read(tmp_path / "run")
    assert [int(step["step"]) for step in rank.steps][:STEPS] == list(range(1, STEPS + 1))
    metrics = rank.of(schema.Metrics)
    backward = [one.values["gpu_backward_seconds"] for one in metrics
                if "gpu_backward_seconds" in one.values]  # fmt: skip
    assert backward
    assert all(seconds > 0 for seconds in backward)
