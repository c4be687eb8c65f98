"""Saving is a phase of its own, and what was saved is an event."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rankscope.wire import schema
from tests.agent.steps.programs import data, loss_of, net
from tests.agent.watching import Watching

MS = 1_000_000


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = data(8).tensors
    loss_of(model, x, y).backward()
    optimizer.step()


class Slow:
    """Takes its time to be pickled."""

    def __reduce__(self) -> Any:
        time.sleep(0.05)
        return Slow, ()


def saves(watching: Watching) -> list[schema.Event]:
    return [one for one in watching.of(schema.Event) if one.name == "checkpoint"]


@pytest.mark.parametrize("target", ["path", "file", "buffer"])
def test_torch_save(watching: Watching, tmp_path: Path, target: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "model.pt"
    train(model, optimizer)
    state = {"model": model.state_dict(), "slow": Slow()}
    if target == "path":
        torch.save(state, path)
    elif target == "file":
        with path.open("wb") as file:
            torch.save(state, file)
    else:
        buffer = io.BytesIO()
        torch.save(obj=state, f=buffer)
        path.write_bytes(buffer.getvalue())
    train(model, optimizer)
    first, second = watching.steps
    assert second["checkpoint_ns"] > 50 * MS
    assert second["flags"] == schema.STEP_CHECKPOINT
    assert second["forward_ns"] + second["other_ns"] < second["ended_ns"] - second["started_ns"]
    assert not first["flags"] & schema.STEP_CHECKPOINT
    (event,) = saves(watching)
    assert event.step == 2
    assert float(event.fields["seconds"]) > 0.05
    if target == "buffer":
        assert "path" not in event.fields
    else:
        assert event.fields["path"] == str(path)
    if target != "file":
        assert event.fields["bytes"] == str(path.stat().st_size)


def test_a_save_that_fails_is_the_users_error(watching: Watching, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save({}, tmp_path / "nowhere" / "model.pt")
    assert not saves(watching)


@pytest.mark.filterwarnings("ignore")  # of dcp itself, without a process group
def test_distributed_checkpoints(watching: Watching, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    weight = model.state_dict()["0.weight"].clone()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "a")
    train(model, optimizer)
    assert watching.steps[1]["checkpoint_ns"] > 0
    assert watching.steps[1]["flags"] == schema.STEP_CHECKPOINT
    (event,) = saves(watching)
    assert event.fields["how"] == "dcp.save"
    assert event.fields["path"] == str(tmp_path / "a")
    loaded = {"model": net(5).state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "a")
    assert torch.equal(loaded["model"]["0.weight"], weight)
