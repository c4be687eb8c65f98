"""What is recorded when memory runs out, and that the exception goes on as it was."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rankscope.rank.hooks.memory import (
    cuda_numbers,
    is_memory_error,
    largest_tensors,
    resident,
    snapshot_facts,
)
from rankscope.wire import schema
from tests.agent import recorded
from tests.agent.steps.programs import net
from tests.agent.watching import Watching

SCRIPT = """
import torch
held = [torch.zeros(1 << 20) for _ in range(3)]
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
torch.empty(1 << 50)
"""


def test_the_script_runs_out_of_memory(tmp_path: Path) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(SCRIPT)
    done: dict[str, subprocess.CompletedProcess[str]] = {}
    for attached in ("1", "0"):
        done[attached] = recorded.run(tmp_path, str(script), RANKSCOPE=attached)
        assert done[attached].returncode == 1
    assert done["1"].stderr == done["0"].stderr
    assert "can't allocate memory" in done["1"].stderr
    (rank,) = recorded.read(tmp_path)
    (event,) = [one for one in rank.of(schema.Event) if one.name == "out of memory"]
    assert str(4 << 50) in event.fields["message"]
    assert f"3 x {4 << 20}" in event.fields["largest_tensors"]
    assert int(event.fields["rss_bytes"]) > 12 << 20
    assert event.fields["host_MemTotal"].endswith("kB")
    kinds = [type(one) for one in rank.records]
    assert kinds.index(schema.ErrorRaised) > kinds.index(schema.Event)  # written first


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 50)


def test_a_backward_pass_runs_out_of_memory_and_the_script_goes_on(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        Greedy.apply(model(torch.ones(2, 8))).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    (event,) = (one for one in watching.of(schema.Event) if one.name != schema.OPTIMIZER_USED)
    assert event.name == "out of memory"
    assert len(watching.steps) == 1


def test_tensors_without_memory_of_their_own_do_not_hide_the_others() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.empty(1 << 40)
    whole = torch.zeros(1 << 20)
    functional = torch._to_functional_tensor(torch.zeros(3))  # has no storage to ask for
    tracked = [fake, whole, functional]
    text = largest_tensors()
    assert mode is not None
    assert len(tracked) == 3
    assert f" x {4 << 20}" in text


def test_pages_of_a_file_are_told_apart(tmp_path: Path) -> None:
    path, size = tmp_path / "data", 64 << 20
    path.write_bytes(b"\x01" * size)
    before = resident()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == size // 4096
        of_file = resident()
    held = b"\x01" * size
    own = resident()
    assert of_file.file_bytes - before.file_bytes > 0.9 * size
    assert own.all_bytes - before.all_bytes > 0.9 * len(held)
    assert own.file_bytes - before.file_bytes < 0.1 * size


def test_what_counts_as_out_of_memory() -> None:
    assert is_memory_error(MemoryError())
    assert is_memory_error(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_memory_error(RuntimeError("shape mismatch"))
    assert not is_memory_error(ValueError("can't allocate memory"))


def test_a_snapshot_is_summarised() -> None:
    def block(state: str, size: int) -> dict[str, Any]:
        return {"state": state, "size": size}

    segments = [
        {"blocks": [block("active_allocated", 100), block("inactive", 30)]},
        {"blocks": [block("active_allocated", 10)] * 20 + [block("inactive", 70)]},
    ]
    assert snapshot_facts(segments) == {
        "segments": "2", "largest_free_block_bytes": "70", "largest_blocks": "20 x 10, 1 x 100",
    }  # fmt: skip
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 10, "num_ooms": 1}
    found = cuda_numbers(stats)
    assert found["cuda_fragmentation_bytes"] == 7
    assert found["cuda_ooms"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("watching", [{"hooks": "optimizer,backward,memory,loss"}], indirect=True)
def test_the_allocators_numbers_are_recorded(watching: Watching) -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    seen: dict[str, float] = {}
    for record in watching.of(schema.Metrics):
        seen |= record.values
    assert seen["cuda_reserved_bytes"] >= seen["cuda_allocated_bytes"] > 0
    assert math_is_finite(seen["loss"])


def math_is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
