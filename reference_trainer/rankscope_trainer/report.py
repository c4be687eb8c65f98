"""What a rank reports of its training: log lines, metrics, and exact losses."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import rankscope

logger = logging.getLogger("rankscope_trainer")

# A no-op while no agent watches this process, and absent from agents before 0.1.
_log_metrics: Callable[..., None] | None = getattr(rankscope, "log_metrics", None)


def name_lines(who: str) -> None:
    """Begin each line of the log with the time and who writes it."""
    form = f"%(asctime)s {who} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)


class Report:
    """Counts tokens and time between log lines, and passes on what was measured."""

    def __init__(
        self, *, log_every: int, tokens_per_step: int, losses: str, is_for_job: bool = False
    ) -> None:
        """Open the file of losses, if this rank is to write one.

        One rank is `is_for_job`: it reports what is of the job and not of a rank.
        """
        self._log_every = log_every
        self._losses: TextIO | None = None
        self._attempt: dict[str, int] = {}
        self._steps = 0
        self._since = time.perf_counter()
        self.regrouped(tokens_per_step, losses, is_for_job=is_for_job)

    def regrouped(self, tokens_per_step: int, losses: str, *, is_for_job: bool = False) -> None:
        """Report for another group from now on, of which this rank may be the one that writes."""
        self._tokens_per_step = tokens_per_step
        self._is_for_job = is_for_job
        self._ended: float | None = None  # when the step before did
        self.close()
        self._losses = None
        if losses:
            Path(losses).parent.mkdir(parents=True, exist_ok=True)
            self._losses = Path(losses).open("a", encoding="utf-8")

    def step(self, step: int, loss: float | None, learning_rate: float, **measured: float) -> None:
        """Report one finished step, with whatever else the strategy measured in it."""
        metrics: dict[str, Any] = {
            "tokens": float(self._tokens_per_step),
            "learning_rate": learning_rate,
            **measured,
        }
        now = time.perf_counter()
        if self._is_for_job and self._ended is not None:
            metrics["job_tokens_per_second"] = self._tokens_per_step / (now - self._ended)
        self._ended = now
        if loss is not None:
            metrics["loss"] = loss
        if _log_metrics is not None:
            _log_metrics(step, **metrics)
        if self._losses is not None and loss is not None:
            # Hexadecimal, so that two runs can be compared bit for bit.
            line = {"step": step, "loss": loss.hex(), **self._attempt}
            self._losses.write(json.dumps(line) + "\n")
            self._losses.flush()
        self._steps += 1
        if step % self._log_every == 0:
            self._log(step, loss)

    def attempt(self, step: int, attempt: int, world_size: int, restarts: int) -> None:
        """Report that the run starts, for the first time (attempt 0) or again."""
        if _log_metrics is not None:
            _log_metrics(step, attempt=attempt, world_size=world_size, restarts=restarts)
        self._attempt = {"attempt": attempt}
        text = "attempt %d after step %d with %d ranks, restarts of this node: %d"
        logger.info(text, attempt, step, world_size, restarts)

    def skipped(self, step: int, batches: int, own: int) -> None:
        """Report how many batches were skipped since the start, and how many were corrupt here."""
        if _log_metrics is not None:
            _log_metrics(step, skipped_batches=batches, corrupt_batches=own)
        logger.warning("step %d corrupt batches skipped so far: %d", step, batches)

    def validation(self, step: int, loss: float | None) -> None:
        """Report one validation."""
        if loss is None:
            return
        if _log_metrics is not None:
            _log_metrics(step, validation_loss=loss)
        logger.info("step %d validation loss %.4f", step, loss)

    def close(self) -> None:
        """Close the file of losses."""
        if self._losses is not None:
            self._losses.close()

    def _log(self, step: int, loss: float | None) -> None:
        now = time.perf_counter()
        tokens_per_second = self._steps * self._tokens_per_step / (now - self._since)
        loss_text = "on another rank" if loss is None else f"{loss:.4f}"
        logger.info("step %d loss %s tokens/s %.0f", step, loss_text, tokens_per_second)
        self._steps, self._since = 0, now
