"""The same program with and without every hook computes the same losses, bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope.rank.step_metrics import SamplingSchedule
from rankscope.wire import schema
from tests.agent.steps import programs
from tests.agent.watching import Watching


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda one: one.__name__)
def test_losses_and_random_numbers_are_the_same(
    watching: Watching,
    program: Callable[[], list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        SamplingSchedule, "wants", lambda self, step: True
    )  # all samples on every step
    torch.manual_seed(3)
    random.seed(3)
    watched = program()
    after = torch.rand(3), random.random()
    assert watching.steps
    assert watching.of(schema.Metrics)
    watching.agent.remove_hooks()
    torch.manual_seed(3)
    random.seed(3)
    alone = program()
    assert [value.hex() for value in watched] == [value.hex() for value in alone]
    assert torch.equal(after[0], torch.rand(3))
    assert after[1] == random.random()


def test_nothing_is_left_behind(watching: Watching) -> None:
    import gc

    from torch.optim import optimizer as module
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    programs.plain(epochs=1)
    assert hasattr(torch.save, "__wrapped__")
    watching.agent.remove_hooks()
    for function in (
        torch.save, torch.nn.Module.eval, torch.nn.Module.train, torch.autograd.backward,
        torch.amp.GradScaler.step, torch.nn.utils.clip_grad_norm_, module.Optimizer.__init__,
        torch.autograd.graph._engine_run_backward, _BaseDataLoaderIter.__next__,
    ):  # fmt: skip
        assert not function.__code__.co_filename.startswith(rankscope.__path__[0])
    for hooks in (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks):
        assert not hooks
    assert not [one for one in gc.callbacks if "rankscope" in getattr(one, "__module__", "")]
    assert not any(vars(watching.context.events).values())


def test_warnings_of_torch_name_the_same_place(watching: Watching) -> None:
    """Many are raised for who called, which must not become a hook."""

    def places() -> list[tuple[str, int, str]]:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            schedule.step()  # before the optimizer's
            data = TensorDataset(torch.ones(4, 4))
            for (x,) in DataLoader(data, batch_size=2, pin_memory=True):  # without a device
                model(x).sum().backward()
                optimizer.step()
            torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)  # an old name
            torch.nn.functional.mse_loss(torch.ones(2, 1), torch.ones(2))  # sizes differ
        return [(one.filename, one.lineno, str(one.message)) for one in seen]

    watched = places()
    watching.agent.remove_hooks()
    assert len(watched) >= 3
    assert watched == places()
