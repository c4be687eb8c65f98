"""A torch.nn.Module as a planner sees it: built on the meta device, run once, nothing computed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rankscope.planning.errors import PlanError
from rankscope.planning.model import Model, Part, Precision
from rankscope.rank.hooks.numbers.layers import layers_of

if TYPE_CHECKING:
    import torch
    from torch import nn

_REMEDY = "Name a function without arguments, or a class, that returns a torch.nn.Module"
_MOST_NUMBERS = 1 << 40


class _Side:
    """What was counted in one place: before the layers, in them, after them."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.saved_bytes = 0.0
        self.output_bytes = 0.0
        self.parameters: dict[int, float] = {}  # by identity

    def part(self, copies: int = 1) -> Part:
        parameters = sum(self.parameters.values())
        return Part(
            parameters / copies, self.flops / copies, self.saved_bytes / copies, self.output_bytes
        )


def model_of_module(
    name: str, shape: str | None, sequence: int, precision: Precision
) -> tuple[Model, str]:
    """Return the model that MODULE:CALLABLE makes, and a note on how it was measured.

    Raises PlanError where it cannot be imported, built or run.
    """
    try:
        import torch
    except ImportError as error:
        remedy = "Install torch here, or give the numbers of the model"
        raise PlanError("model", "a module needs torch", remedy) from error
    make = _imported(name)
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:
        raise PlanError("model", f"{name} failed: {_words(error)}", _REMEDY) from error
    if not isinstance(module, torch.nn.Module):
        raise PlanError("model", f"{name} returned a {type(module).__name__}", _REMEDY)
    if any(parameter.device.type != "meta" for parameter in module.parameters()):
        remedy = "Let it make its tensors on the default device"
        raise PlanError("model", f"{name} puts weights on a device of its own", remedy)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    module.to(dtype[precision.name])
    sample = _sample(shape, sequence, dtype[precision.name])
    layers = layers_of(module)
    run = _Run(module, layers)
    run.once(sample, shape)
    first, inside, last = run.first, run.inside, run.last
    shared = last.parameters.keys() & first.parameters.keys()
    model = Model(
        name=name, first=first.part(), layer=inside.part(len(layers)), num_layers=len(layers),
        last=last.part(), precision=precision,
        tokens=sample.shape[1] if sample.ndim > 1 and not sample.is_floating_point() else 1,
        tied_parameters=sum(last.parameters[key] for key in shared),
    )  # fmt: skip
    return model, (
        f"{name}: {len(layers)} layers of {type(layers[0]).__name__}, one sample of "
        f"{'x'.join(map(str, sample.shape))} run on the meta device; attention counted as fused"
    )


def _imported(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` would find it
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        remedy = "Start from the directory that holds it, or set PYTHONPATH"
        raise PlanError("model", f"cannot import {module}: {_words(error)}", remedy) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise PlanError("model", f"{module} has no callable {attribute!r}", _REMEDY)
    return found  # type: ignore[no-any-return]


def _sample(shape: str | None, sequence: int, floating: torch.dtype) -> torch.Tensor:
    import torch

    text = shape or (f"int64:1x{sequence}" if sequence else "")
    if not text:
        remedy = "Give --sequence for tokens, or --input such as float32:1x3x224x224"
        raise PlanError("input", "what one sample looks like is not known", remedy)
    kind, _, sizes = text.partition(":")
    dtype = getattr(torch, kind, None)
    try:
        numbers = [int(size) for size in sizes.split("x")]
    except ValueError:
        numbers = []
    total = 1
    for number in numbers:
        total *= number
    if not isinstance(dtype, torch.dtype) or not numbers or not 0 < total < _MOST_NUMBERS:
        remedy = "Write int64:1x128 or float32:1x3x224x224; the first number is the samples, 1"
        raise PlanError("input", f"{text!r} is no type and shape", remedy)
    if numbers[0] != 1:
        remedy = "Write 1 as the first number"
        raise PlanError("input", f"{text!r} has {numbers[0]} samples", remedy)
    dtype = floating if dtype.is_floating_point else dtype
    return torch.zeros(numbers, dtype=dtype, device="meta")


class _Run:
    """One run of a module, and where in it something is counted."""

    def __init__(self, module: nn.Module, layers: list[nn.Module]) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self.first, self.inside, self.last = _Side(), _Side(), _Side()
        self._module, self._layers = module, layers
        self._now = self.first
        self._counter = FlopCounterMode(display=False)
        self._counted = 0
        # what is a weight is not an activation
        self._seen = {p.untyped_storage()._cdata for p in module.parameters()}
        self._kept: list[torch.Tensor] = []  # a storage that is freed may leave its number
        self._own = {id(p) for layer in layers for p in layer.parameters()}
        self.inside.parameters = {
            id(p): float(p.numel()) for layer in layers for p in layer.parameters()
        }

    def once(self, sample: torch.Tensor, shape: str | None) -> None:
        """Run the sample through. Raises PlanError."""
        import torch

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._enter).remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
            for part in self._module.modules():
                stack.callback(part.register_forward_pre_hook(self._use).remove)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            for context in (hooks, self._counter, _fused_attention(self._attended)):
                stack.enter_context(context)
            try:
                self._module(sample)
            except Exception as error:
                text = shape or f"tokens of shape {tuple(sample.shape)}"
                remedy = "Give --input with the type and shape of one sample"
                problem = f"forward failed on {text}: {_words(error)}"
                raise PlanError("input", problem, remedy) from error
        self._settle()
        used = self._own | self.first.parameters.keys() | self.last.parameters.keys()
        for parameter in self._module.parameters():  # of modules that were not called as such
            if id(parameter) not in used:
                self.first.parameters[id(parameter)] = float(parameter.numel())

    def _settle(self) -> None:
        total = self._counter.get_total_flops()
        self._now.flops += total - self._counted
        self._counted = total

    def _enter(self, _layer: nn.Module, _inputs: Any) -> None:
        self._settle()
        self._now = self.inside

    def _leave(self, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        self._settle()
        self._now = self.last
        tensor = output[0] if isinstance(output, tuple) else output
        self.inside.output_bytes = float(getattr(tensor, "nbytes", 0))

    def _use(self, part: nn.Module, _inputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in self._own:
                self._now.parameters[id(parameter)] = float(parameter.numel())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(tensor)
            self._now.saved_bytes += storage.nbytes()
        return tensor

    def _attended(self, flops: float) -> None:
        self._now.flops += flops


@contextlib.contextmanager
def _fused_attention(count: Callable[[float], None]) -> Iterator[None]:
    """Let attention keep what a fused kernel keeps, and count its FLOPs; on meta there is none."""
    import torch
    import torch.nn.functional as F

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            ctx.save_for_backward(query, key, value, out)
            return out

    def fused(query: Any, key: Any, value: Any, *_arguments: Any, **_keywords: Any) -> Any:
        rows = query.numel() // query.shape[-1]
        count(2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
        apply: Any = Kernel.apply
        return apply(query, key, value)

    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
