"""By what a script divides its loss, read from the graph of each backward pass of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rankscope.rank.hooks.numbers.loss_scale import factors_of
from rankscope.wire import schema
from tests.agent.watching import Watching

LAYER = nn.Linear(4, 3)
INPUTS, CLASSES = torch.ones(2, 4), torch.tensor([0, 2])


def entropy(**how: Any) -> Tensor:
    return functional.cross_entropy(LAYER(INPUTS), CLASSES, **how)


def train(passes: int, scaled: Callable[[Tensor], Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(LAYER.parameters(), lr=0.01)
    for _ in range(steps):
        for _ in range(passes):
            scaled(entropy()).backward()
        optimizer.step()
        optimizer.zero_grad()


def said(watching: Watching) -> list[dict[str, str]]:
    return [one.fields for one in watching.of(schema.Event) if one.name == "loss scale"]


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (lambda: entropy(), ("", "mean")),
        (lambda: entropy() / 4, ("4", "mean")),
        (lambda: entropy() / 4 / 2, ("2 4", "mean")),
        (lambda: 0.25 * entropy(), ("4", "mean")),
        (lambda: (entropy() / 4).squeeze().clone(), ("4", "mean")),
        (lambda: functional.mse_loss(LAYER(INPUTS), torch.ones(2, 3)), ("", "mean")),
        (lambda: LAYER(INPUTS).mean() / 3, ("3", "mean")),
        (lambda: LAYER(INPUTS).sum() / 2, ("2", "sum")),
        (lambda: entropy(reduction="sum") / 2, ("2", "sum")),
        (lambda: entropy() + 0.1 * LAYER.weight.norm(), ("", "")),
        (lambda: entropy() / LAYER.weight.norm(), ("", "")),
        (lambda: LAYER.weight[0, 0], ("", "")),
    ],
)
def test_what_the_graph_shows(loss: Callable[[], Tensor], known: tuple[str, str]) -> None:
    assert factors_of(loss()) == known


def test_the_factor_of_a_gradient_scaler_is_left_out() -> None:
    assert factors_of(entropy() / 4 * 1024.0, skips_one=True) == ("4", "mean")
    assert factors_of(torch.ones(())) is None


def test_a_step_of_several_passes_is_recorded_once(watching: Watching) -> None:
    train(3, lambda loss: loss / 3 / 3)
    assert said(watching) == [
        {"passes": "3", "local": "0", "factors": "3 3", "reduction": "mean"},
    ]


def test_a_step_of_one_pass_or_of_unlike_ones_is_not(watching: Watching) -> None:
    train(1, lambda loss: loss / 4)
    turns = iter(range(100))
    train(2, lambda loss: loss / (1 + next(turns) % 2))
    assert not said(watching)


def test_a_pass_that_was_made_again_in_one_step_is_not(watching: Watching) -> None:
    train(1, lambda loss: loss / 4)
    train(2, lambda loss: loss / 4, steps=1)
    train(1, lambda loss: loss / 4)
    assert not said(watching)


def test_hooks_on_what_graphs_save_are_left_alone(watching: Watching) -> None:
    """A checkpoint may compute its part again but once; reading from it would be that time."""
    calls = []

    def part(inputs: Tensor) -> Tensor:
        calls.append(1)
        return functional.cross_entropy(LAYER(inputs), CLASSES) / 2

    optimizer = torch.optim.SGD(LAYER.parameters(), lr=0.01)
    for _ in range(2):
        for _ in range(2):
            checkpoint(part, INPUTS, use_reentrant=False).backward()
        optimizer.step()
    assert len(calls) == 2 * 2 * 2
    assert not said(watching)
