"""For the Hugging Face Trainer: `Trainer(..., callbacks=[RankscopeCallback()])`."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

import rankscope
from rankscope.integrations import numbers_of, training_begins
from rankscope.rank.guard import guarded

_FACTS = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler_type", "optim", "bf16", "fp16", "gradient_checkpointing",
    "max_grad_norm", "dataloader_num_workers", "seed",
)  # fmt: skip


class RankscopeCallback(TrainerCallback):
    """The Trainer's own step numbers, its evaluations and checkpoints, and what it logs."""

    def __init__(self) -> None:
        self._phase = contextlib.ExitStack()

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from where the Trainer counts: a resumed run continues at its step."""
        training_begins("huggingface", {name: getattr(args, name, None) for name in _FACTS})
        rankscope.set_step(state.global_step + 1)

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Whatever was begun is over."""
        self._phase.close()

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step; the Trainer says here what it does before the next one."""
        rankscope.step(state.global_step)
        self._what_follows(control)

    @guarded
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same for what is done once an epoch."""
        self._what_follows(control)

    @guarded
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An evaluation is over; a checkpoint may follow."""
        self._phase.close()
        if control.should_save:
            self._phase.enter_context(rankscope.phase("checkpoint"))

    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is written."""
        self._phase.close()

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Whatever was begun is over."""
        self._phase.close()

    @guarded
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Record what the Trainer logs, and the tokens seen where it counts them."""
        values = numbers_of(logs or {}) or {}
        if getattr(state, "num_input_tokens_seen", 0):
            values["tokens_seen"] = float(state.num_input_tokens_seen)
        if values:
            rankscope.log_metrics(state.global_step, **values)

    def _what_follows(self, control: Any) -> None:
        self._phase.close()
        if control.should_evaluate:
            self._phase.enter_context(rankscope.phase("evaluation"))
        elif control.should_save:
            self._phase.enter_context(rankscope.phase("checkpoint"))
