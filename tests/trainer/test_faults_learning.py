"""Mistakes with gradients: none at all, or added up on the wrong scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.launch import run


def test_without_a_gradient_the_loss_is_always_that_of_even_odds(tmp_path: Path) -> None:
    ended = run(tmp_path, 1, "--steps", "5", "--fault", "no_gradient:start=2")
    assert ended.code == 0, ended.output
    losses = ended.losses()
    assert {round(losses[step], 4) for step in range(2, 6)} == {5.5452}  # ln 256
    assert ended.manifest()[-1]["fired"] == 4 * 2  # both microbatches


@pytest.mark.parametrize(("fault", "times"), [("divided_twice", 0.5), ("not_divided", 2.0)])
def test_the_gradient_is_on_another_scale_and_the_reported_loss_is_not(
    tmp_path: Path, fault: str, times: float
) -> None:
    """SGD moves by its gradient, so after one step a rate that makes up for it learns the same."""
    results = []
    for name, rate, more in (
        ("with", 0.5 / times, ("--fault", f"{fault}:start=1")), ("without", 0.5, ()),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        ended = run(
            folder, 1, "--steps", "3", "--optimizer", "sgd", "--weight-decay", "0",
            "--learning-rate", str(rate), *more,
        )  # fmt: skip
        assert ended.code == 0, ended.output
        results.append(ended.losses())
    assert results[0] == results[1]
