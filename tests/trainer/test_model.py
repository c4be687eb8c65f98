from __future__ import annotations

import pytest
import torch

from rankscope_trainer.model import GPT, next_byte_loss, stage_layers


def _model(layers: int = 5) -> GPT:
    return GPT(layers=layers, width=16, heads=2, context=12, dropout=0.0, seed=3)


TOKENS = torch.arange(24).view(2, 12) * 7 % 256


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_stages_together_are_the_whole_model(num_stages: int) -> None:
    whole = _model()
    stages = [_model().keep_stage(stage, num_stages) for stage in range(num_stages)]
    x = TOKENS
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(TOKENS))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]


def test_layers_are_spread_evenly_and_none_is_lost() -> None:
    for layers in range(1, 12):
        for num_stages in range(1, layers + 1):
            stages = [stage_layers(layers, stage, num_stages) for stage in range(num_stages)]
            assert [layer for stage in stages for layer in stage] == list(range(layers))
            sizes = [len(stage) for stage in stages]
            assert max(sizes) - min(sizes) <= 1


def test_no_position_sees_a_later_one() -> None:
    model = _model()
    changed = TOKENS.clone()
    changed[:, 8:] = 0
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = _model()
    torch.manual_seed(2)
    other = _model()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_untrained_model_is_about_as_wise_as_a_guess() -> None:
    loss = next_byte_loss(_model()(TOKENS), TOKENS.roll(-1, 1))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
