"""The training loss as the framework itself logs it.

What `backward()` is called on is another number where a framework divides it, as by the passes of
an accumulated step, or averages it over ranks and steps.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded
from rankscope.wire import schema

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_NAME = "logged_loss"
# under which Lightning modules log it, by the framework's own examples
_OF_LIGHTNING = frozenset({"loss", "train_loss", "train/loss", "training_loss", "train_loss_step"})


class TrainerLoss:
    """`loss` in the logs of the Hugging Face Trainer."""

    name: ClassVar[str] = "trainer-loss"
    needs: ClassVar[str] = "transformers.trainer"

    def install(self, agent: Agent) -> str:
        """Listen to `Trainer.log`, which has the Trainer's own step."""
        from transformers.trainer import Trainer

        @guarded
        def take(trainer: Any, logs: Any, *_: Any, **__: Any) -> None:
            loss = logs.get("loss")
            if isinstance(loss, float | int) and agent.recorder is not None:
                agent.recorder.record(
                    schema.Metrics(
                        **agent.here(),
                        step=int(trainer.state.global_step),
                        values={_NAME: float(loss)},
                        counted_step=agent.recorder.step,
                    )
                )

        _listen(agent, Trainer, take)
        return "Trainer.log"


class LightningLoss:
    """What a Lightning module logs under a usual name of the training loss."""

    name: ClassVar[str] = "lightning-loss"
    needs: ClassVar[str] = "lightning.pytorch.core.module"

    def install(self, agent: Agent) -> str:
        """Listen to `LightningModule.log`."""
        owner = importlib.import_module(self.needs).LightningModule

        @guarded
        def take(module: Any, name: str, value: Any, *_: Any, **__: Any) -> None:
            if name not in _OF_LIGHTNING or not module.training or not agent.sheet.due:
                return
            if hasattr(value, "device"):
                agent.sheet.put_tensor(_NAME, value.detach())
            elif isinstance(value, float | int):
                agent.sheet.put(_NAME, float(value))

        _listen(agent, owner, take)
        return "LightningModule.log"


class OldLightningLoss(LightningLoss):
    """The same of the package under its old name, which is another copy of the code."""

    name: ClassVar[str] = "pytorch-lightning-loss"
    needs: ClassVar[str] = "pytorch_lightning.core.module"


def _listen(agent: Agent, owner: Any, take: Callable[..., None]) -> None:
    """Have `take` see the arguments of each call of `owner.log`."""
    original: Any = owner.log

    @functools.wraps(original)
    def log(*args: Any, **kwargs: Any) -> Any:
        take(*args, **kwargs)
        return original(*args, **kwargs)

    agent.patch(owner, "log", log)
