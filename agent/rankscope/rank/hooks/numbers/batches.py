"""Samples and tokens of a step, from the shapes of the batches that were learnt from.

They are those of a data loader, or, in a script that draws its batches without one, what the
model under DDP is called with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep
from rankscope.wire import formulas

_MAX_TENSORS = 16  # of one batch that are looked at
_MAX_DEPTH = 3


class Batches:
    """Samples and tokens per step and second, and what share of the peak FLOP/s they make."""

    name: ClassVar[str] = "batches"
    needs: ClassVar[str] = "torch.utils.data.dataloader"

    def install(self, context: Context) -> str:
        """Listen to data loaders and DDP: a batch counts once a backward pass follows it."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self._is_grad_enabled = torch.is_grad_enabled
        self._context = context
        self._latest: tuple[int, int] | None = None  # samples and tokens of the last batch
        self._ahead: tuple[int, int] | None = None  # of one before it: a loader may fetch one early
        self._has_loader = False
        self._called: tuple[int, int] | None = None  # of what the model was last called with
        self._samples = self._tokens = 0
        self._of_step = 0  # what these two are of
        context.listen("batch", self._batch)
        context.listen("backward", self._backward)
        context.listen("step", self._step, sampled=True)
        original: Any = DistributedDataParallel._pre_forward
        is_compiling, call = torch.compiler.is_compiling, guarded(self._call)

        def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                call(inputs, kwargs)
            return original(self, *inputs, **kwargs)

        context.patch(DistributedDataParallel, "_pre_forward", _pre_forward)
        return "shapes of the batches of data loaders, else of what DDP is called with"

    def _call(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._has_loader and self._context.clock.is_ours() and self._is_grad_enabled():
            self._called = size_of(inputs) or size_of(kwargs)

    def _batch(self, item: Any) -> None:
        self._has_loader = True
        # a batch that nothing is to be learnt from, as of an evaluation, was not fetched early
        self._ahead = (self._latest or self._ahead) if self._is_grad_enabled() else None
        self._latest = size_of(item)

    def _backward(self, roots: Any) -> None:
        size = self._latest or self._ahead or self._called
        self._called = None
        if size is not None:
            if self._of_step != self._context.clock.step:
                self._of_step = self._context.clock.step
                self._samples = self._tokens = 0
            self._samples += size[0]
            self._tokens += size[1]
            self._latest, self._ahead = None, self._ahead if self._latest else None

    def _step(self, ended: EndedStep) -> None:
        samples, tokens = self._samples, self._tokens
        metrics = self._context.metrics
        if self._of_step != ended.step or not samples or not ended.duration_ns:
            return
        seconds = ended.duration_ns / 1e9
        metrics.put("samples", samples)
        metrics.put("samples_per_second", samples / seconds)
        if not tokens:
            return
        metrics.put("tokens", tokens)
        metrics.put("tokens_per_second", tokens / seconds)
        if metrics.num_parameters:
            flops = formulas.training_flops(metrics.num_parameters, tokens)
            metrics.put("model_flops_per_second", flops / seconds)
            peak = self._context.settings.peak_flops
            if peak > 0:
                metrics.put("mfu_ratio", flops / seconds / peak)


def size_of(batch: Any) -> tuple[int, int] | None:
    """Return (samples, tokens) of a batch, None where it holds no tensor with a first dimension.

    Samples are the first dimension of its first tensor; tokens the elements of `input_ids`, or
    of its first matrix of integers.
    """
    samples, tokens = 0, 0
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if _dimensions(ids) == 2:
        tokens = ids.numel()
    for tensor in tensors_of(batch):
        samples = samples or int(tensor.shape[0])
        if not tokens and tensor.ndim == 2 and _is_integer(tensor):
            tokens = tensor.numel()
    return (samples, tokens) if samples else None


def tensors_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors of a batch that have a dimension, some of them where there are many."""
    return itertools.islice(_tensors(batch, _MAX_DEPTH), _MAX_TENSORS)


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    if _dimensions(value) > 0:
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value[:_MAX_TENSORS]:
            yield from _tensors(part, depth - 1)


def _dimensions(value: Any) -> int:
    import torch

    return value.ndim if isinstance(value, torch.Tensor) else 0


def _is_integer(tensor: Any) -> bool:
    import torch

    return tensor.dtype in (torch.int64, torch.int32)
