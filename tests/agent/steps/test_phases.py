"""Real training loops under the agent: where their time went, and how many steps they were."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rankscope
from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING
from rankscope.rank.hooks.phases import data as data_hook
from rankscope.wire import schema
from rankscope.wire.metric_names import ALTERNATING
from tests.agent.steps import programs
from tests.agent.steps.programs import data, loss_of, net
from tests.agent.watching import Watching

MS = 1_000_000
SLACK_NS = 500 * MS  # a busy machine; that phases add up to the step bounds them too


def with_compiler(test: Any) -> Any:
    """Let warnings pass that are torch's compiler's own: of its imports, and on Python 3.13.0."""
    for words in ("ignore::DeprecationWarning", "ignore:Guards may run slower:RuntimeWarning"):
        test = pytest.mark.filterwarnings(words)(test)
    return test


def near(value_ns: int, seconds: float) -> bool:
    return seconds * 1e9 * 0.9 < value_ns < seconds * 1e9 + SLACK_NS


def test_each_phase_gets_its_time(watching: Watching) -> None:
    model = programs.SlowNet()
    optimizer = programs.SlowSGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(programs.SlowData(8), batch_size=2):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.025)
    steps = watching.steps
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps[1:]:
        assert near(step["data_ns"], 2 * programs.DATA_SECONDS)
        assert near(step["forward_ns"], programs.FORWARD_SECONDS)
        assert near(step["backward_ns"], programs.BACKWARD_SECONDS)
        assert near(step["optimizer_ns"], programs.OPTIMIZER_SECONDS)
        assert near(step["other_ns"], 0.025)
        total = sum(step[f"{phase}_ns"] for phase in schema.PHASES)
        assert total == step["ended_ns"] - step["started_ns"]
        assert step["flags"] == 0
        assert step["evaluation_ns"] == 0


def evaluate_inside(model: nn.Module, loader: Any) -> None:
    model.eval()
    for x, _ in loader:
        with torch.no_grad():
            model(x)
    model.train()


def evaluate_around(model: nn.Module, loader: Any) -> None:
    with torch.inference_mode():
        for x, _ in loader:
            model(x)


def evaluate_bare(model: nn.Module, loader: Any) -> None:
    for x, _ in loader:
        model(x)


@torch.no_grad()
def evaluate_without_loader(model: nn.Module, loader: Any) -> None:
    model.eval()
    for _ in range(4):
        model(torch.zeros(2, 8))
    model.train()


@pytest.mark.parametrize(
    "evaluate", [evaluate_inside, evaluate_around, evaluate_bare, evaluate_without_loader]
)
def test_a_validation_loop_is_evaluation_and_no_step(watching: Watching, evaluate: Any) -> None:
    model = programs.SlowNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    small = DataLoader(data(8), batch_size=2)
    for number, (x, y) in enumerate(DataLoader(data(6), batch_size=2)):
        loss_of(model, x, y).backward()
        optimizer.step()
        if number == 0:
            evaluate(model, small)
    first, second, third = watching.steps
    assert near(second["evaluation_ns"], 4 * programs.FORWARD_SECONDS)
    assert second["flags"] == schema.STEP_EVALUATION
    assert near(second["forward_ns"], programs.FORWARD_SECONDS)
    assert second["data_ns"] < SLACK_NS
    for step in (first, third):
        assert step["evaluation_ns"] == 0
        assert not step["flags"] & schema.STEP_EVALUATION


def test_an_evaluation_that_goes_on_is_told_as_one(watching: Watching) -> None:
    """A slow batch of it is no hang of the forward pass: evaluation is given more patience."""
    header = ring.RingReader(watching.read().directory / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
    model, seen = net(), []
    loader = DataLoader(data(16), batch_size=8)
    for x, y in loader:
        loss_of(model, x, y).backward()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
            seen.append(schema.PHASES[header.u8(ring.PHASE_AT)])
    assert seen == ["evaluation", "evaluation"]
    next(iter(loader))
    assert schema.PHASES[header.u8(ring.PHASE_AT)] == "forward"


def test_a_frozen_part_in_evaluation_mode_is_no_evaluation(watching: Watching) -> None:
    model, teacher = net(), net(1).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(data(24), batch_size=8):
        model.train()
        model[2].eval()  # type: ignore[index]
        with torch.no_grad():
            teacher(x)
        loss_of(model, x, y).backward()
        optimizer.step()
    assert len(watching.steps) == 3
    assert not any(step["flags"] & schema.STEP_EVALUATION for step in watching.steps)


def test_a_batch_fetched_ahead_is_no_evaluation(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the hook itself takes: a machine may be busy."""
    monkeypatch.setattr(data_hook, "_A_FORWARD_NS", 0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        batches = iter(DataLoader(data(24), batch_size=8))
        ahead = next(batches, None)
        while ahead is not None:
            (x, y), ahead = ahead, next(batches, None)
            loss_of(model, x, y).backward()
            optimizer.step()
    steps = watching.steps
    assert len(steps) == 6
    assert not any(step["flags"] & schema.STEP_EVALUATION for step in steps)


def test_gradient_accumulation(watching: Watching) -> None:
    programs.accumulating(micro=4)
    assert [step["microbatches"] for step in watching.steps] == [4, 4, 4]


def test_a_skipped_step_is_closed_and_flagged(watching: Watching) -> None:
    programs.scaled(bad=2)
    steps = watching.steps
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    skipped = [bool(step["flags"] & schema.STEP_SKIPPED) for step in steps]
    assert skipped == [False, False, True, False, False, False]
    assert [step["microbatches"] for step in steps] == [1] * 6


def test_a_skipped_step_without_update_ends_with_the_next_batch(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(data(24), batch_size=8):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, x, y) * float("nan")).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    flags = [step["flags"] & schema.STEP_SKIPPED for step in watching.steps]
    assert flags == [schema.STEP_SKIPPED] * 3  # the last one when the loader is asked again


def test_two_optimizers_in_turn_make_one_step(watching: Watching) -> None:
    programs.gan()
    steps = watching.steps
    assert [step["step"] for step in steps] == list(range(1, 7))
    assert [step["microbatches"] for step in steps] == [2] * 6
    assert all(one.values.get(ALTERNATING) == 1 for one in watching.of(schema.Metrics)[:6])


@pytest.mark.parametrize("steps_in_a_row", [1, 2])
def test_an_optimizer_that_never_steps_takes_no_step_away(
    watching: Watching, steps_in_a_row: int
) -> None:
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
        for _ in range(steps_in_a_row):
            optimizer.step()
    assert unused.param_groups
    assert watching.steps[-1]["step"] == 5


def test_an_error_before_anything_was_learnt_is_in_no_step(watching: Watching) -> None:
    watching.context.error("ValueError", "bad config")
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    watching.context.error("ValueError", "bad sample")
    assert [error.step for error in watching.of(schema.ErrorRaised)] == [0, 3]


def test_two_optimizers_after_one_backward_make_one_step(watching: Watching) -> None:
    model = net()
    halves = [list(model[0].parameters()), list(model[3].parameters())]  # type: ignore[index]
    optimizers = [torch.optim.SGD(halves[0], lr=0.01), torch.optim.Adam(halves[1])]
    for x, y in DataLoader(data(24), batch_size=8):
        loss_of(model, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [step["microbatches"] for step in watching.steps] == [1] * 3
    assert not any(ALTERNATING in one.values for one in watching.of(schema.Metrics))


def test_a_critic_that_steps_more_often_sets_the_pace(watching: Watching) -> None:
    maker, critic = net(), net(1)
    first = torch.optim.SGD(critic.parameters(), lr=0.01)
    second = torch.optim.SGD(maker.parameters(), lr=0.01)
    for number, (x, y) in enumerate(DataLoader(data(48), batch_size=4)):
        loss_of(critic, x, y).backward()
        first.step()
        if number % 4 == 3:
            loss_of(maker, x, y).backward()
            second.step()
    # the first two are one record, which is told as the second: until then both were expected
    assert [step["step"] for step in watching.steps] == list(range(2, 13))


def test_optimizer_in_backward(watching: Watching) -> None:
    model = net()
    optimizers = {one: torch.optim.SGD([one], lr=0.01) for one in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for x, y in DataLoader(data(24), batch_size=8):
        loss_of(model, x, y).backward()
    steps = watching.steps
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["backward_ns"] > 0 for step in steps)


def test_a_script_without_an_optimizer_steps_with_its_backward_passes(watching: Watching) -> None:
    model = net()
    x, y = data(8).tensors
    for number in range(300):
        assert number >= 256 or not watching.context.clock.saw_optimizer
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    steps = watching.steps
    assert steps[0]["microbatches"] == 256
    assert [step["step"] for step in steps] == list(range(256, 301))


def test_a_closure_computes_forward_and_backward(watching: Watching) -> None:
    model = programs.SlowNet()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2)
    x, y = data(8).tensors
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    steps = watching.steps
    assert len(steps) == 2
    assert sum(step["microbatches"] for step in steps) == len(calls)
    for step in steps:
        assert near(step["forward_ns"], step["microbatches"] * programs.FORWARD_SECONDS)
        assert near(step["backward_ns"], step["microbatches"] * programs.BACKWARD_SECONDS)
        assert step["optimizer_ns"] < SLACK_NS


def test_an_optimizer_inside_an_optimizer(watching: Watching) -> None:
    model = net()

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in DataLoader(data(24), batch_size=8):
        loss_of(model, x, y).backward()
        optimizer.step()
    assert [step["microbatches"] for step in watching.steps] == [1] * 3


def test_an_optimizer_that_raised_is_forgotten(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data(8).tensors

    def closure() -> Any:
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        optimizer.step(closure)
    for _ in range(3):
        loss_of(model, x, y).backward()
        optimizer.step()
    assert len(watching.steps) == 3


def test_gradient_penalty_is_no_microbatch(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(data(24), batch_size=8):
        x.requires_grad_()
        loss = loss_of(model, x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    assert [step["microbatches"] for step in watching.steps] == [1] * 3


def test_one_loader_inside_another(watching: Watching) -> None:
    class Outer(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            inner = [x for x, _ in DataLoader(programs.SlowData(2), batch_size=1)]
            return torch.cat(inner), torch.tensor([0, 1])

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(Outer(), batch_size=None):
        loss_of(model, x, y).backward()
        optimizer.step()
    steps = watching.steps
    assert len(steps) == 3
    for step in steps[1:]:
        assert near(step["data_ns"], 2 * programs.DATA_SECONDS)
        assert step["forward_ns"] < programs.DATA_SECONDS * 1e9 + SLACK_NS
        assert step["flags"] == 0


def test_workers_and_streams_are_described(watching: Watching) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        programs.Stream(), batch_size=4, num_workers=1, prefetch_factor=3, persistent_workers=True
    )
    for _ in range(2):  # the same loader again is no news
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
    del loader
    assert len(watching.steps) == 6
    (event,) = [one for one in watching.of(schema.Event) if one.name == "data loader"]
    assert event.fields == {
        "dataset": "Stream", "iterable": "True", "num_workers": "1", "prefetch_factor": "3",
        "batch_size": "4", "pin_memory": "False", "persistent_workers": "True",
        "drop_last": "False",
    }  # fmt: skip


def test_what_the_script_says_counts(watching: Watching) -> None:
    model = programs.SlowNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data(2).tensors
    for number in (1, 2):
        with rankscope.phase("evaluation"):
            for part, _ in DataLoader(data(2), batch_size=2):
                model(part)
        with rankscope.phase("data"):
            time.sleep(0.02)
        with rankscope.phase("forward"):
            loss = loss_of(model, x, y)
        with rankscope.phase("backward"):
            loss.backward()
        with rankscope.phase("my own"):
            time.sleep(0.03)
        optimizer.step()
        rankscope.step(number)
    steps = watching.steps
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert near(step["evaluation_ns"], programs.FORWARD_SECONDS)
        assert near(step["forward_ns"], programs.FORWARD_SECONDS)
        assert near(step["backward_ns"], programs.BACKWARD_SECONDS)
        assert near(step["data_ns"], 0.02)
        assert step["other_ns"] > 25 * MS
        assert step["microbatches"] == 1


@pytest.mark.parametrize("updates", [1, 3])
def test_a_rank_that_only_updates_ends_its_steps_itself(watching: Watching, updates: int) -> None:
    """As a parameter server does: its gradients come from other ranks."""
    weights = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for number in range(1, 5):
        for _ in range(updates):
            weights.grad = torch.ones(4)
            optimizer.step()
        rankscope.step(number)
    assert [step["step"] for step in watching.steps] == [1, 2, 3, 4]


@with_compiler
@pytest.mark.parametrize("compiled_optimizer", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_and_optimizers(
    watching: Watching, backend: str, compiled_optimizer: bool
) -> None:
    torch._dynamo.reset()
    model = net().eval()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    update = optimizer.step
    if compiled_optimizer:
        update = torch.compile(update, backend="eager")
    for x, y in DataLoader(data(48), batch_size=8):
        loss_of(compiled, x, y).backward()
        update()
        optimizer.zero_grad()
    steps = watching.steps
    assert [step["microbatches"] for step in steps] == [1] * 6
    assert all(step["backward_ns"] > 0 and step["forward_ns"] > 0 for step in steps)
    # inside compiled code it cannot be timed; on Python 3.13 the compiler goes around the step
    if sys.version_info < (3, 13):
        assert not (steps[3]["optimizer_ns"] and compiled_optimizer)
    assert compiled_optimizer or steps[3]["optimizer_ns"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@with_compiler
def test_compiled_code_may_change_modes(watching: Watching) -> None:
    torch._dynamo.reset()
    model = net()

    @torch.compile(backend="eager")
    def infer(x: torch.Tensor) -> Any:
        model.eval()
        y = model(x)
        model.train()
        return y

    x, y = data(8).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        infer(x)
        loss_of(model, x, y).backward()
        optimizer.step()
    assert len(watching.steps) == 2


def test_garbage_and_faults_are_counted(watching: Watching) -> None:
    import gc

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data(8).tensors
    for number in range(3):
        loss_of(model, x, y).backward()
        if number == 1:
            cycles: list[Any] = [[] for _ in range(1000)]
            for one in cycles:
                one.append(one)
            del cycles, one
            gc.collect()
            torch.ones(4 << 20).sum()  # 16 MiB of new pages
        if number == 2:
            time.sleep(0.01)
        optimizer.step()
    steps = watching.steps
    assert steps[1]["gc_ns"] > 100_000
    assert steps[1]["gc_ns"] <= steps[1]["ended_ns"] - steps[1]["started_ns"]
    assert steps[1]["minor_faults"] > 1
    assert steps[2]["voluntary_switches"] >= 1
    for step in steps:
        assert 0 < step["cpu_ns"] <= step["process_cpu_ns"] + MS
        assert step["copy_ns"] == 0  # no GPU here


def test_the_thread_that_trains_has_the_steps(watching: Watching) -> None:
    """The main thread as soon as the other one has ended."""
    import threading

    def work() -> None:
        programs.plain(epochs=1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(watching.steps) == 6
    programs.plain(epochs=1)
    assert [step["step"] for step in watching.steps] == list(range(1, 13))
    first = [step["step"] for step in watching.steps if step["flags"] & schema.STEP_FIRST]
    assert first == [1, 7]  # of each thread: its forward had begun before anybody knew of it
    for step in watching.steps:
        assert step["backward_ns"] > 0
        assert step["forward_ns"] > 0 or step["step"] in first
