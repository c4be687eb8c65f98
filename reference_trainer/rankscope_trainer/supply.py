"""Brings each step its batch: a sound one, when the data is there, unless it is time to leave."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

import torch

from rankscope_trainer.agreement import State, agree, needs_agreement
from rankscope_trainer.data import Batches, Sample
from rankscope_trainer.settings import Settings

# What a file says when its disk, its mount or its server has gone away.
GONE = (errno.ENOENT, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENOTCONN)
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 30.0
MOST_CORRUPT_IN_A_ROW = 10  # then it is not one batch, but the data

logger = logging.getLogger("rankscope_trainer")


def is_gone(error: OSError) -> bool:
    """Return whether the data may come back: its source does not answer."""
    return error.errno in GONE


class Pauses:
    """Exponential back-off: each pause is twice the one before, all together are bounded."""

    def __init__(self, limit_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Begin with the shortest pause."""
        self.waited_seconds = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._limit_seconds = limit_seconds
        self._sleep = sleep

    def pause(self) -> bool:
        """Wait; return False, at once, when the limit is reached."""
        left = self._limit_seconds - self.waited_seconds
        if left <= 0:
            return False
        pause = min(self._pause_seconds, left)
        self._sleep(pause)
        self.waited_seconds += pause
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        return True


class Supply:
    """Draws the batches of one rank; what goes wrong on one of them concerns all."""

    def __init__(
        self,
        batches: Batches,
        settings: Settings,
        device: torch.device,
        *,
        needs_data: bool,
        on_batch: Callable[[Sample], None],
        on_skip: Callable[[int, int, int], None],
        save: Callable[[int], None],
        signal: Callable[[], int],
    ) -> None:
        """Take where batches come from, how to save a step, and where to ask for signals."""
        self.must_leave = 0  # the signal for which all ranks leave
        self.skipped = 0  # batches, since the start
        self._corrupt = 0  # of them this rank's own
        self._batches = batches
        self._iterator = iter(batches)
        self._settings = settings
        self._agrees = needs_agreement(settings)
        self._device = device
        self._needs_data = needs_data
        self._on_batch = on_batch
        self._on_skip = on_skip
        self._save = save
        self._signal = signal
        self._error: OSError | None = None

    def next(self, step: int) -> Sample | None:
        """Return the batch of a step; None if all ranks leave instead."""
        pauses = Pauses(self._settings.data_wait_seconds)
        corrupt_in_a_row = 0
        while True:
            position = self._batches.position
            batch, own = self._load(step)
            if not self._agrees:
                return batch
            agreed = agree(own, self._device)
            if agreed.signal:
                self._go_back(position)
                self._save(step - 1)
                self.must_leave = agreed.signal
                return None
            if agreed.is_gone:
                self._go_back(position)
                self._wait(step, pauses)
            elif agreed.is_corrupt:
                self.skipped += 1
                self._corrupt += own.is_corrupt
                self._on_skip(step, self.skipped, self._corrupt)
                corrupt_in_a_row += 1
                if corrupt_in_a_row == MOST_CORRUPT_IN_A_ROW:
                    raise RuntimeError(f"{corrupt_in_a_row} batches in a row are corrupt")
            else:
                return batch

    def _load(self, step: int) -> tuple[Sample, State]:
        signal = self._signal()
        try:
            batch = next(self._iterator) if self._needs_data else self._batches.skip()
        except OSError as error:
            if not self._settings.data_path or not is_gone(error):
                raise
            self._error = error
            blank = torch.empty(0, dtype=torch.long)
            return (blank, blank), State(is_gone=True, signal=signal)
        self._error = None
        self._on_batch(batch)
        corrupt = self._batches.corrupt(batch) if self._settings.check_batches else []
        if corrupt:
            logger.warning("step %d: skipped a corrupt batch, windows %s", step, corrupt)
        return batch, State(is_corrupt=bool(corrupt), signal=signal)

    def _go_back(self, position: int) -> None:
        """Give the batch back: it is drawn again."""
        self._batches.position = position
        self._iterator = iter(self._batches)

    def _wait(self, step: int, pauses: Pauses) -> None:
        """Save what there is, then wait, on all ranks for the same time."""
        if not pauses.waited_seconds:
            logger.warning("step %d: waiting for the data, %s", step, self._error or "as others do")
            self._save(step - 1)
        if not pauses.pause():
            raise self._error or TimeoutError("the data of another rank did not come back")
