"""The training loss: the tensor of backward(), and the loss as the framework itself logs it.

What `backward()` is called on is another number where a framework divides it, as by the passes of
an accumulated step, or averages it over ranks and steps.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep
from rankscope.wire.metric_names import ALTERNATING

_MAX_PASSES = 64  # of one step whose losses are kept


class Losses:
    """Mean of the losses of a step's backward passes, before a gradient scaler scaled them."""

    name: ClassVar[str] = "loss"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, context: Context) -> str:
        """Listen to backward passes and scalers."""
        import torch

        self._context = context
        self._stack = torch.stack
        self._seen: list[Any] = []
        self._unscaled: Any = None
        context.listen("backward", self._backward, sampled=True)
        context.listen("scaled", self._scaled)
        context.listen("step", self._step, sampled=True)
        return "the tensor of backward()"

    def _scaled(self, outputs: Any) -> None:
        if self._context.metrics.due:
            self._unscaled = _scalar(outputs)

    def _backward(self, roots: Any) -> None:
        if not self._context.metrics.due or len(roots) != 1 or len(self._seen) >= _MAX_PASSES:
            return
        loss = self._unscaled if self._unscaled is not None else _scalar(roots[0])
        self._unscaled = None
        if loss is not None:
            self._seen.append(loss)

    def _step(self, ended: EndedStep) -> None:
        seen, self._seen, self._unscaled = self._seen, [], None
        if not seen or not self._context.metrics.due:
            return
        if self._context.cycle.alternates:
            self._context.metrics.put(ALTERNATING, 1.0)
        if all(isinstance(loss, float) for loss in seen):
            self._context.metrics.put("loss", sum(seen) / len(seen))
        elif len({loss.device for loss in seen if not isinstance(loss, float)}) == 1:
            mean = self._stack(seen).mean() if len(seen) > 1 else seen[0]
            self._context.metrics.put_tensor("loss", mean)


def _scalar(value: Any) -> Any:
    """Return a float from the CPU, a detached scalar of a device, None for anything else."""
    import torch

    if type(value) is not torch.Tensor or value.numel() != 1 or not value.is_floating_point():
        return None
    if value.device.type == "cpu":
        return float(value.detach())  # not `item`: scripts count or forbid its calls
    return value.detach().reshape(())


_NAME = "logged_loss"
# under which Lightning modules log it, by the framework's own examples
_OF_LIGHTNING = frozenset({"loss", "train_loss", "train/loss", "training_loss", "train_loss_step"})


class TrainerLoss:
    """`loss` in the logs of the Hugging Face Trainer."""

    name: ClassVar[str] = "trainer-loss"
    needs: ClassVar[str] = "transformers.trainer"

    def install(self, context: Context) -> str:
        """Listen to `Trainer.log`, which has the Trainer's own step."""
        from transformers.trainer import Trainer

        @guarded
        def take(trainer: Any, logs: Any, *_: Any, **__: Any) -> None:
            loss = logs.get("loss")
            if isinstance(loss, float | int):
                context.record_given(int(trainer.state.global_step), {_NAME: float(loss)})

        _listen(context, Trainer, take)
        return "Trainer.log"


class LightningLoss:
    """What a Lightning module logs under a usual name of the training loss."""

    name: ClassVar[str] = "lightning-loss"
    needs: ClassVar[str] = "lightning.pytorch.core.module"

    def install(self, context: Context) -> str:
        """Listen to `LightningModule.log`."""
        owner = importlib.import_module(self.needs).LightningModule

        @guarded
        def take(module: Any, name: str, value: Any, *_: Any, **__: Any) -> None:
            if name not in _OF_LIGHTNING or not module.training or not context.metrics.due:
                return
            if hasattr(value, "device"):
                context.metrics.put_tensor(_NAME, value.detach())
            elif isinstance(value, float | int):
                context.metrics.put(_NAME, float(value))

        _listen(context, owner, take)
        return "LightningModule.log"


class OldLightningLoss(LightningLoss):
    """The same of the package under its old name, which is another copy of the code."""

    name: ClassVar[str] = "pytorch-lightning-loss"
    needs: ClassVar[str] = "pytorch_lightning.core.module"


def _listen(context: Context, owner: Any, take: Callable[..., None]) -> None:
    """Have `take` see the arguments of each call of `owner.log`."""
    original: Any = owner.log

    @functools.wraps(original)
    def log(*args: Any, **kwargs: Any) -> Any:
        take(*args, **kwargs)
        return original(*args, **kwargs)

    context.patch(owner, "log", log)
