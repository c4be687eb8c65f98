"""Norms of the gradients: of this rank alone before DDP reduces them, and of the reduced ones.

Sampled by a schedule. A hook on each parameter sees its gradient before DDP's own hook
takes it away; the hooks are there for sampled steps only. Gradients of FSDP and DTensor are
reduced elsewhere: of them the norm of this rank's shard is recorded, and no local one.
"""

from __future__ import annotations

import math
import time
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep

_EVERY = 16  # steps, to begin with
_BUDGET_SHARE = 0.25


class Gradients:
    """Gradient norms, local and reduced, and which rank brought in NaN or infinity; sampled."""

    name: ClassVar[str] = "gradients"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, context: Context) -> str:
        """Listen to backward passes and optimizers."""
        import torch

        self._context, self._torch = context, torch
        self._schedule = context.schedule(self.name, _EVERY, _BUDGET_SHARE)
        self._handles: list[Any] = []
        self._norms: dict[int, Any] = {}
        self._cost_ns = 0
        self._is_scaled = False  # the local gradients of this step bear a gradient scaler's factor
        self._step = 0  # the last one that was sampled
        context.listen("scaled", self._scaled)
        context.listen("backward", self._backward, sampled=True)
        context.listen("optimizer", self._optimizer, sampled=True)
        context.listen("step", self._ended, sampled=True)
        context.add_undo(self._remove)
        return f"each {_EVERY}th step, less often where that costs too much"

    def _scaled(self, outputs: Any) -> None:
        self._is_scaled = True

    def _backward(self, roots: Any) -> None:
        if not self._schedule.wants(self._context.clock.step) or self._handles:
            return
        began = time.thread_time_ns()
        seen = guarded(self._seen)
        for model in self._context.replicated:
            if model.process_group.size() > 1:
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        self._handles.append(parameter.register_post_accumulate_grad_hook(seen))
        self._cost_ns += time.thread_time_ns() - began

    def _seen(self, parameter: Any) -> None:
        """Take the norm of one parameter's gradient, in whatever thread autograd runs.

        A microbatch adds to what is there, so the norm of the last one replaces those before.
        """
        began = time.thread_time_ns()
        gradient = parameter.grad
        if type(gradient) is self._torch.Tensor and gradient.layout is self._torch.strided:
            self._norms[id(parameter)] = self._norm(gradient.detach())
        self._cost_ns += time.thread_time_ns() - began

    def _optimizer(self, optimizer: Any) -> None:
        step = self._context.clock.step
        if not self._schedule.wants(step) or step == self._step:
            return
        self._step = step
        began = time.thread_time_ns()
        metrics = self._context.metrics
        local = self._total(list(self._norms.values()))
        if local is not None and not self._is_scaled:
            metrics.put_tensor("gradient_norm_local", local)
        elif local is not None:  # the factor is not known here, and does not matter for this:
            metrics.put_tensor("gradient_local_nonfinite", local, _is_nonfinite)
        reduced = metrics.clipped
        if reduced is None and getattr(optimizer, "grad_scale", None) is None:
            reduced = self._total(self._norms_of(optimizer))
        if reduced is not None:
            metrics.put_tensor("gradient_norm", reduced)
        self._cost_ns += time.thread_time_ns() - began

    def _ended(self, ended: EndedStep) -> None:
        self._is_scaled = False
        if self._cost_ns:
            self._remove()
            self._schedule.spent(self._cost_ns, self._context.metrics.step_ns)
            self._cost_ns = 0

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._norms.clear()

    def _norms_of(self, optimizer: Any) -> list[Any]:
        """Return the norm of each gradient of an optimizer, of its shard if it is distributed."""
        gradients = [
            getattr(parameter.grad, "_local_tensor", parameter.grad).detach()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.grad.layout is self._torch.strided
        ]
        return [self._norm(gradient) for gradient in gradients if gradient.numel()]

    def _norm(self, tensor: Any) -> Any:
        # accumulated in float32 at least, without a copy of the tensor
        if tensor.dtype in (self._torch.float16, self._torch.bfloat16):
            return self._torch.linalg.vector_norm(tensor, dtype=self._torch.float32)
        return self._torch.linalg.vector_norm(tensor)

    def _total(self, norms: list[Any]) -> Any:
        if not norms or len({norm.device for norm in norms}) > 1:
            return None
        return self._norm(self._torch.stack([norm.float() for norm in norms]))


class Clipping:
    """The gradient norm that clip_grad_norm_ computes anyway."""

    name: ClassVar[str] = "clipping"
    needs: ClassVar[str] = "torch.nn.utils.clip_grad"

    def install(self, context: Context) -> str:
        """Patch the function in its module and in torch.nn.utils."""
        import torch
        import torch.nn.utils
        import torch.nn.utils.clip_grad as module

        original, is_compiling = module.clip_grad_norm_, torch.compiler.is_compiling

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            total = original(*args, **kwargs)
            clipped(total, args[2] if len(args) > 2 else kwargs.get("norm_type", 2.0))
            return total

        @guarded
        def clipped(total: Any, norm_type: Any) -> None:
            # the total of a DTensor may need a collective: not ours to call
            if context.clock.is_ours() and type(total) is torch.Tensor and norm_type == 2:
                context.metrics.clipped = total.detach()
                if context.metrics.due:
                    context.metrics.put_tensor("gradient_norm", context.metrics.clipped)

        context.patch_all((module, torch.nn.utils), "clip_grad_norm_", clip_grad_norm_)
        return "clip_grad_norm_"


def _is_nonfinite(norm: Any) -> float:
    return float(not math.isfinite(float(norm)))
