"""For Lightning: `Trainer(..., callbacks=[RankscopeCallback()])`."""

from __future__ import annotations

import contextlib
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning import Callback

import rankscope
from rankscope.integrations import numbers_of, training_begins
from rankscope.rank.guard import guarded

_FACTS = (
    "max_steps", "max_epochs", "accumulate_grad_batches", "precision", "gradient_clip_val",
    "num_training_batches", "val_check_interval", "world_size", "num_nodes",
)  # fmt: skip


class RankscopeCallback(Callback):
    """Lightning's step numbers, validations and tests, and the metrics that modules log."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = contextlib.ExitStack()
        self._step = self._optimizer_steps = 0

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from where Lightning counts: a resumed run continues at its step."""
        facts = {name: getattr(trainer, name, None) for name in _FACTS}
        training_begins("lightning", facts | {"strategy": type(trainer.strategy).__name__})
        self._step = self._optimizer_steps = trainer.global_step
        rankscope.set_step(self._step + 1)

    @guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step if an optimizer moved; several optimizers of one batch are one step."""
        if trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        self._step += 1
        if self._step % max(1, trainer.log_every_n_steps) == 0:
            self._log(trainer)
        rankscope.step(self._step)

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation begins; the check before training is one too."""
        self._phase.enter_context(rankscope.phase("evaluation"))

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what the validation logged."""
        self._phase.close()
        if not trainer.sanity_checking:
            self._log(trainer)

    @guarded
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """A test begins."""
        self._phase.enter_context(rankscope.phase("evaluation"))

    @guarded
    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what the test logged."""
        self._phase.close()
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        values = numbers_of(trainer.logged_metrics) or {}
        if values:
            rankscope.log_metrics(self._step, **values)
