"""What an older PyTorch cannot do is refused by name, before the library hangs or fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies import versions
from rankscope_trainer.strategies.stages import schedule

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_schedule_that_would_hang_on_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.require_schedule("1f1b", CPU)
    monkeypatch.delattr(schedules, "_wait_batch_p2p")
    with pytest.raises(SettingError, match=r"`schedule`: 1f1b of PyTorch .* Choose gpipe"):
        versions.require_schedule("1f1b", CPU)
    versions.require_schedule("gpipe", CPU)
    versions.require_schedule("1f1b", CUDA)


def test_fsdp_without_events_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.require_fully_shard(CPU)
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    with pytest.raises(SettingError, match="`strategy`"):
        versions.require_fully_shard(CPU)
    versions.require_fully_shard(CUDA)


def test_cutting_layers_as_2_6_does_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.require_own_weights()
    monkeypatch.setattr(versions, "parallelize_module", lambda module, mesh, plan: module)
    with pytest.raises(SettingError, match="cannot cut these layers"):
        versions.require_own_weights()


def test_neighbours_greet_in_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.9 makes the messages: a whole number one way, a float the other."""

    class Operation:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def operations(stage: Any) -> list[Operation]:
        return [Operation(torch.zeros(1)), Operation(torch.tensor(3))]

    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", operations)
    stage = schedule.Stage.__new__(schedule.Stage)
    assert [one.tensor.nbytes for one in stage._get_init_p2p_neighbors_ops()] == [4, 4]
