"""Evaluation by `model.eval()` ... `model.train()`: the time between, if nothing was learnt in it.

Parts of a model may stay in evaluation mode while it trains (frozen layers, a teacher). So the
time counts as evaluation only when `train()` comes and no backward pass has run since `eval()`.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EVALUATION, OTHER, Mark

_MAX_WAITING = 16  # modules in evaluation mode that are waited for


class Evaluation:
    """Time between a module's `eval()` and `train()` without a backward pass."""

    name: ClassVar[str] = "evaluation"
    needs: ClassVar[str] = "torch.nn.modules.module"

    def install(self, context: Context) -> str:
        """Patch the two methods on Module; compiled code sees the originals."""
        import torch
        from torch.nn.modules.module import Module

        modes = _Modes(context)
        original_eval, original_train = Module.eval, Module.train
        is_compiling = torch.compiler.is_compiling

        def eval(self: Any) -> Any:
            if not is_compiling():
                modes.began(self)
            return original_eval(self)

        def train(self: Any, mode: bool = True) -> Any:
            if mode and not is_compiling() and modes.waiting:
                modes.ended(self)
            return original_train(self, mode)

        context.patch(Module, "eval", eval)
        context.patch(Module, "train", train)
        return "Module.eval and Module.train"


class _Modes:
    """The modules that were put into evaluation mode, and when."""

    def __init__(self, context: Context) -> None:
        import torch

        self._clock = context.clock
        self._is_grad_enabled = torch.is_grad_enabled
        self.waiting: dict[int, tuple[weakref.ref[Any], Mark]] = {}

    @guarded
    def began(self, module: Any) -> None:
        """A module enters evaluation mode."""
        clock, waiting = self._clock, self.waiting
        if not module.training or not clock.is_ours():
            return
        if len(waiting) >= _MAX_WAITING:
            del waiting[next(iter(waiting))]
        waiting[id(module)] = weakref.ref(module), clock.mark()
        if clock.phase == OTHER and not self._is_grad_enabled():
            clock.enter(EVALUATION)

    @guarded
    def ended(self, module: Any) -> None:
        """A module enters training mode."""
        found = self.waiting.pop(id(module), None)
        if found is None or not self._clock.is_ours():
            return
        reference, mark = found
        if reference() is module:
            self._clock.was_evaluation(mark)
            if self._clock.phase == EVALUATION:
                self._clock.enter(OTHER)
