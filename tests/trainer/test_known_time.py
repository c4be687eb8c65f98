from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from rankscope_trainer.known_time import layer_times, make_times_known
from rankscope_trainer.model import GPT, next_byte_loss

TOKENS = torch.arange(12).view(1, 12)


def _model() -> GPT:
    return GPT(layers=2, width=16, heads=2, context=12, dropout=0.0, seed=3)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def test_a_layer_sleeps_once_forward_and_twice_backward(slept: list[float]) -> None:
    model = _model()
    make_times_known(model, [0.5, 0.25])
    scores = model(TOKENS)
    assert slept == [0.5, 0.25]
    slept.clear()
    next_byte_loss(scores, TOKENS).backward()
    assert sorted(slept) == [0.25, 0.25, 0.5, 0.5]


def test_the_halves_of_a_backward_sleep_when_they_run(slept: list[float]) -> None:
    stage = _model().keep_layers([1])
    make_times_known(stage, [0.5])
    x_BTD = torch.randn((1, 12, 16), requires_grad=True)
    loss = next_byte_loss(stage(x_BTD), TOKENS)
    slept.clear()
    _, groups = stage_backward_input([loss], None, [x_BTD], stage.parameters())
    assert slept == [0.5]
    stage_backward_weight(stage.parameters(), groups)
    assert slept == [0.5, 0.5]


def test_what_is_computed_does_not_change() -> None:
    plain, slow = _model(), _model()
    make_times_known(slow, [0.001, 0.0])
    for model in (plain, slow):
        next_byte_loss(model(TOKENS), TOKENS).backward()
    for one, other in zip(plain.parameters(), slow.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_one_time_stands_for_all_layers() -> None:
    assert layer_times("0.5", 3) == [0.5, 0.5, 0.5]
    assert layer_times("0.5,0,1", 3) == [0.5, 0.0, 1.0]


def test_weights_that_are_put_in_place_later_sleep_too(slept: list[float]) -> None:
    model = _model()
    make_times_known(model, [0.5, 0.25])
    for block in model.blocks.values():  # as FSDP2 and DTensor do, once the model is built
        block.norm_attention.weight = torch.nn.Parameter(torch.ones(16))
    for _ in range(2):
        slept.clear()
        next_byte_loss(model(TOKENS), TOKENS).backward()
        assert sorted(slept) == [0.25, 0.25, 0.25, 0.5, 0.5, 0.5]
