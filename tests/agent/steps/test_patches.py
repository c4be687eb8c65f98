"""What a script sees of the functions, methods and streams that the agent has replaced."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from rankscope.rank.context import Context
from rankscope.rank.hooks.output import Output
from rankscope.rank.hooks.pauses import TimedMethod
from tests.agent.watching import Watching

Patched = list[tuple[Any, str, Any]]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Patched:
    """Everything that an agent replaces from now on: owner, name and what was there."""
    seen: Patched = []
    patch = Context.patch

    def noting(self: Context, owner: Any, name: str, replacement: Any) -> None:
        seen.append((owner, name, getattr(owner, name)))
        patch(self, owner, name, replacement)

    monkeypatch.setattr(Context, "patch", noting)
    return seen


def pickled(function: Any) -> object:
    """Return what pickle makes of a function: itself, by its name, or why it cannot."""
    try:
        return pickle.loads(pickle.dumps(function)) is function  # noqa: S301 - made here
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return type(error)


def test_a_function_keeps_its_name_its_signature_and_how_it_is_pickled(
    patched: Patched, watching: Watching
) -> None:
    ours = [(owner, name, then) for owner, name, then in patched if isinstance(then, FunctionType)]
    assert {"clip_grad_norm_", "save", "eval", "train", "step", "scale"} <= {n for _, n, _ in ours}
    for owner, name, then in ours:
        now = getattr(owner, name)
        assert now is not then
        assert inspect.signature(now) == inspect.signature(then), name
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            assert getattr(now, attribute) == getattr(then, attribute), name
    here = {(owner, name): pickled(getattr(owner, name)) for owner, name, _ in ours}
    watching.agent.remove_hooks()
    assert here == {(owner, name): pickled(getattr(owner, name)) for owner, name, _ in ours}


MODEL = torch.nn.Linear(4, 4)


def clip(x: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(MODEL.parameters(), 1e9) + x


def evaluate(x: Any) -> Any:
    MODEL.eval()
    y = MODEL(x)
    MODEL.train()
    return y


def recompute(x: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(MODEL, x, use_reentrant=False)


def move(x: Any) -> Any:
    return x.to(torch.float64)


@pytest.mark.parametrize("function", [clip, evaluate, recompute, move])
def test_what_compiles_into_one_graph_still_does(
    function: Callable[[Any], Any], watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", TimedMethod(watching.context, torch.Tensor.to))
    MODEL(torch.ones(2, 4)).sum().backward()
    x = torch.ones(2, 4)
    expected = function(x)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


class Known(torch.Tensor):
    """A tensor that keeps its class in the methods that it knows, as those of torchvision do."""

    keep: frozenset[Any] = frozenset({torch.Tensor.to})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in cls.keep else result


def test_a_timed_method_is_known_as_the_one_that_it_replaces(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", TimedMethod(watching.context, original))
    assert type(torch.ones(2).as_subclass(Known).to(torch.float64)) is Known
    assert torch.Tensor.to == original
    assert original in {torch.Tensor.to}
    assert torch.Tensor.to.__name__ == "to"
    assert pickle.loads(pickle.dumps(torch.Tensor.to)) == original  # noqa: S301 - made here
    assert torch.ones(2).to(torch.float64).dtype == torch.float64


class OfBatch(torch.optim.SGD):
    """Reads and counts by attributes of its closure, as line searches do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        closure.num_calls += 1
        super().step()
        return loss / closure.batch_size


@pytest.mark.parametrize("is_named", [True, False])
def test_a_closure_keeps_its_attributes(watching: Watching, is_named: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = OfBatch(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).sum()
        loss.backward()
        return loss

    closure.batch_size, closure.num_calls = 4, 0  # type: ignore[attr-defined]
    for _ in range(2):
        optimizer.step(closure=closure) if is_named else optimizer.step(closure)
    assert closure.num_calls == 2  # type: ignore[attr-defined]
    assert len(watching.steps) == 2


class TwoPlaces:
    """A stream of a script, as progress bars and loggers make them."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, bool]] = []

    def write(self, message: str, flush: bool = False) -> int:
        self.texts.append((message, flush))
        return len(message)


def test_a_stream_of_the_script_takes_what_it_took(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = TwoPlaces()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("rankscope.rank.hooks.output.source_of", lambda *_: "python")
    Output().install(watching.context)
    assert "write" in vars(stream)
    assert stream.write("a\n", flush=True) == 2
    assert stream.write(message="b\n") == 2
    assert stream.texts == [("a\n", True), ("b\n", False)]
