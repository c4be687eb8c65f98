"""Stacks on demand and at fatal signals, by faulthandler: both work while Python is stuck."""

from __future__ import annotations

import faulthandler
import signal
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.files.run_directory import FATAL, STACKS
from rankscope.rank.hooks.base import HookSkipped

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_FIRST_SIGNAL = 5  # above SIGRTMIN; glibc and profilers use the ones below
_TRIES = 10


class Stacks:
    """Python stacks of all threads, when the collector asks and when a fatal signal comes."""

    name: ClassVar[str] = "stacks"
    needs: ClassVar[str] = "signal"

    def __init__(self) -> None:
        self._files: list[Any] = []  # faulthandler keeps descriptors only

    def install(self, agent: Agent) -> str:
        """Wait for the recorder: the files lie in the rank's directory."""
        agent.on_recorder(self._open)
        return "faulthandler"

    def _open(self, agent: Agent) -> None:
        assert agent.recorder is not None
        number = _free_signal()
        stacks = (agent.recorder.directory / STACKS).open("a")
        self._files.append(stacks)
        if not faulthandler.is_enabled():  # else its file stays the user's
            fatal = (agent.recorder.directory / FATAL).open("a")
            self._files.append(fatal)
            faulthandler.enable(file=fatal)
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        agent.recorder.set_stack_signal(number)  # last: the collector sends it only now


def _free_signal() -> int:
    for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMIN + _FIRST_SIGNAL + _TRIES):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise HookSkipped("no free real-time signal")
