"""Stacks on demand and at fatal signals, by faulthandler: both work while Python is stuck."""

from __future__ import annotations

import faulthandler
import signal
from typing import Any, ClassVar

from rankscope.files.run_directory import FATAL, STACKS
from rankscope.rank.context import Context, HookSkipped

_FIRST_SIGNAL = 5  # above SIGRTMIN; glibc and profilers use the ones below
_TRIES = 10


class Stacks:
    """Python stacks of all threads, when the collector asks and when a fatal signal comes."""

    name: ClassVar[str] = "stacks"
    needs: ClassVar[str] = "signal"

    def __init__(self) -> None:
        self._files: list[Any] = []  # faulthandler keeps descriptors only

    def install(self, context: Context) -> str:
        """Wait for the recorder: the files lie in the rank's directory."""
        context.on_recorder(self._open)
        return "faulthandler"

    def _open(self, context: Context) -> None:
        assert context.recorder is not None
        number = _free_signal()
        stacks = (context.recorder.directory / STACKS).open("a")
        self._files.append(stacks)
        if not faulthandler.is_enabled():  # else its file stays the user's
            fatal = (context.recorder.directory / FATAL).open("a")
            self._files.append(fatal)
            faulthandler.enable(file=fatal)
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        context.recorder.set_stack_signal(number)  # last: the collector sends it only now


def _free_signal() -> int:
    for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMIN + _FIRST_SIGNAL + _TRIES):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise HookSkipped("no free real-time signal")
