"""Stacks on demand and at fatal signals, by faulthandler: both work while Python is stuck."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rankscope.files.append_file import AppendFile
from rankscope.files.run_directory import FATAL, STACKS
from rankscope.rank.context import Context, HookSkipped

_FIRST_SIGNAL = 5  # above SIGRTMIN; glibc and profilers use the ones below
_TRIES = 10


class Stacks:
    """Python stacks of all threads, when the collector asks and when a fatal signal comes."""

    name: ClassVar[str] = "stacks"
    needs: ClassVar[str] = "signal"

    def __init__(self) -> None:
        self._uses: list[tuple[AppendFile, Path, Callable[[int], object]]] = []

    def install(self, context: Context) -> str:
        """Wait for the recorder: the files lie in the rank's directory."""
        context.on_recorder(self._open)
        with context.within(context.lasting_scope):
            context.listen("step", lambda ended: self._look(context))
        return "faulthandler"

    def _open(self, context: Context) -> None:
        assert context.recorder is not None
        number = _free_signal()
        if not faulthandler.is_enabled():  # else its file stays the user's
            self._use(
                context.recorder.directory / FATAL, lambda file: faulthandler.enable(file=file)
            )
        self._use(
            context.recorder.directory / STACKS,
            lambda file: faulthandler.register(number, file=file, all_threads=True, chain=False),
        )
        context.recorder.set_stack_signal(number)  # last: the collector sends it only now

    def _use(self, path: Path, use: Callable[[int], object]) -> None:
        """Give a file to faulthandler, which keeps its number only."""
        file = AppendFile(path)
        use(file.descriptor)
        self._uses.append((file, path, use))

    def _look(self, context: Context) -> None:
        """Open anew what the script has closed: the number may be that of a file of its own."""
        if context.recorder is None:
            return  # a fork: the files are the parent's
        for file, path, use in self._uses:
            if not file.is_open():
                file.open(path)
                use(file.descriptor)


def _free_signal() -> int:
    for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMIN + _FIRST_SIGNAL + _TRIES):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise HookSkipped("no free real-time signal")
