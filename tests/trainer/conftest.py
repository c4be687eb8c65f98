"""What many tests of the trainer use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rankscope_trainer import report
from rankscope_trainer.world import World, join_world

Reported = list[tuple[int, dict[str, float]]]  # steps, and the metrics of each


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in the ranks: sums come in the same order, and threads do not wait for a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world() -> Iterator[World]:
    """A process group of this process alone."""
    yield join_world(device="cpu", timeout_seconds=30)
    dist.destroy_process_group()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    """The metrics that a run in this process reports to the agent."""
    metrics: Reported = []
    monkeypatch.setattr(
        report, "_log_metrics", lambda step, **values: metrics.append((step, values))
    )
    return metrics
