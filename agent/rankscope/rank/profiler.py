"""A few steps under torch.profiler, begun and ended between steps in the main thread.

The trace is written to a file by torch; nothing is parsed here, that would stop the training.
A profiler of the script itself always comes first: with one at work ours does not start, and
ours gives way when one starts meanwhile, for torch has only one at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.rank.guard import guarded

MAX_SECONDS = 120.0  # slow steps: fewer of them


class ProfilerRefused(Exception):
    """There is no trace; the message is the reason that people read."""


class ProfilerWindow:
    """`num_steps` steps of this process, then the file at `path`. `start` begins."""

    def __init__(
        self, path: Path, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._num_steps = num_steps
        self._clock = clock
        self._started = 0.0
        self._done = 0
        self._profile: Any = None
        self._lost = ""  # why there will be no file
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to record. Raises ProfilerRefused."""
        import torch
        import torch.autograd.profiler as module

        if getattr(module, "_is_profiler_enabled", False) or torch._C._autograd._profiler_enabled():
            raise ProfilerRefused("a profiler of the script is at work; torch has one at a time")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        try:
            profile.start()
        except RuntimeError as error:
            raise ProfilerRefused(f"torch.profiler did not start: {error}") from error
        self._profile = profile
        self._watch_for_others(module)
        self._started = self._clock()

    def step_ended(self) -> str:
        """Count a step; at the last one write the file and say what it holds, else return "".

        Raises ProfilerRefused where there will be no file.
        """
        if self._lost:
            raise ProfilerRefused(self._lost)
        self._done += 1
        seconds = self._clock() - self._started
        if self._done < self._num_steps and seconds < MAX_SECONDS:
            return ""
        try:
            self._end()
            temporary = self.path.with_suffix(".new.json")
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(self.path)
        except (RuntimeError, OSError, ValueError) as error:
            raise ProfilerRefused(f"the trace was not written: {error}") from error
        finally:
            self._profile = None
        if self._done < self._num_steps:
            return f"{self._done} of {self._num_steps} steps: {MAX_SECONDS:.0f} s had passed"
        return f"{self._done} step{'s' if self._done > 1 else ''} in {seconds:.3g} s"

    def abandon(self, why: str) -> None:
        """Stop without a file, in the thread that started.

        torch crashes in a process that ends while it profiles.
        """
        if self._profile is not None and not self._lost:
            self._lost = why
            self._end()

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._profile.stop()

    def _watch_for_others(self, module: Any) -> None:
        """Stop ours before another profiler starts: torch would raise in the script."""

        @guarded
        def give_way() -> None:
            with contextlib.suppress(RuntimeError):
                self.abandon("a profiler of the script started: ours gave way")

        prepare, on_start = module.profile._prepare_trace, module._run_on_profiler_start

        def _prepare_trace(profiler: Any, *args: Any) -> Any:
            give_way()
            return prepare(profiler, *args)

        def _run_on_profiler_start() -> Any:
            give_way()
            return on_start()

        def restore() -> None:
            if module.profile._prepare_trace is _prepare_trace:
                module.profile._prepare_trace = prepare
            if module._run_on_profiler_start is _run_on_profiler_start:
                module._run_on_profiler_start = on_start

        module.profile._prepare_trace = _prepare_trace
        module._run_on_profiler_start = _run_on_profiler_start
        self._undo.append(restore)
