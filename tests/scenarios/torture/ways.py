"""What must be known about each way of dying."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """A way of dying, and what its record must say. `code`: the exit code that the case chose."""

    name: str
    reason: str
    signal: int | None = None
    exit_code: int | str | None = None  # "code": the chosen one
    error: str = ""  # type of the error that the victim must have left
    where: str = ""
    said: str = ""  # type of a second error, out of what C++ printed at its end
    is_orderly: bool = False  # the record then tells the last step that was done
    detail: str = ""  # words that the end's sentence must hold
    stacks: str = ""  # name of the function that the stacks must show, before the harness kills


WAYS: tuple[Way, ...] = (
    Way("sigterm", "signal", signal.SIGTERM),
    Way("sigkill", "signal", signal.SIGKILL),
    Way("sigint", "signal", signal.SIGINT, None, "KeyboardInterrupt", "main"),
    Way("segfault", "signal", signal.SIGSEGV, None, "Segmentation fault", "fatal_signal"),
    Way("abort", "signal", signal.SIGABRT, None, "Aborted", "fatal_signal"),
    Way("bus-error", "signal", signal.SIGBUS, None, "Bus error", "fatal_signal"),
    Way("divide-by-zero", "signal", signal.SIGFPE, None, "Floating point exception",
        "fatal_signal"),
    Way("terminate", "signal", signal.SIGABRT, None, "Aborted", "fatal_signal",
        said="std::terminate"),
    Way("os-exit", "exit_code", None, "code"),
    Way("sys-exit", "exit_code", None, "code", is_orderly=True),
    Way("exception", "exception", None, 1, "ValueError", "main"),
    Way("thread-exception", "exit_code", None, "code", "ValueError", "thread"),
    Way("memory-error", "exception", None, 1, "MemoryError", "main"),
    Way("oom-killer", "signal", signal.SIGKILL, detail="OOM killer fired"),
    Way("deadlock", "signal", signal.SIGKILL, stacks="in deadlock"),
    Way("holds-interpreter-lock", "signal", signal.SIGKILL, stacks="in hold_interpreter_lock"),
    Way("parent-killed", "exit_code", None, "code"),
)  # fmt: skip
