"""Faults of the rank's process before a forward: it ends, hangs, or leaves the step early."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rankscope_trainer")


class FaultInjectedError(RuntimeError):
    """The failure that `crash` stands for; nothing else raises it."""


class _Crash(Fault):
    finding = "crash"
    place = Place.BEFORE_FORWARD


class Crash(_Crash):
    """The rank raises an exception before a forward and dies of it."""

    name = "crash"

    def fire(self, context: FaultContext) -> None:
        """Raise, as a loader does that meets a truncated record."""
        raise FaultInjectedError(
            f"rank {context.rank} cannot decode the batch of step {context.step}:"
            " record ends after 17 of 65 bytes"
        )


class OsExit(_Crash):  # a C library that calls `exit`
    """The rank calls `os._exit(3)` before a forward: no traceback, no clean-up."""

    name = "os_exit"

    def fire(self, context: FaultContext) -> None:
        """Leave at once."""
        os._exit(3)


class SigKill(_Crash):  # the kernel's out-of-memory killer, or an impatient operator
    """The rank is killed by SIGKILL before a forward."""

    name = "sigkill"

    def fire(self, context: FaultContext) -> None:
        """Send the signal that no program can catch."""
        os.kill(os.getpid(), signal.SIGKILL)


class Segfault(_Crash):  # a broken kernel, or a wrong pointer in an extension
    """The rank reads memory at address 0 before a forward and dies of SIGSEGV."""

    name = "segfault"

    def fire(self, context: FaultContext) -> None:
        """Read where nothing is."""
        ctypes.string_at(0)


class Abort(_Crash):  # a failed check in C++
    """The rank calls C's `abort` before a forward and dies of SIGABRT."""

    name = "abort"

    def fire(self, context: FaultContext) -> None:
        """Abort."""
        os.abort()


class _Hang(Fault):
    finding = "hang"
    place = Place.BEFORE_FORWARD


class Hang(_Hang):  # a deadlock, or a file system that does not answer
    """The rank sleeps for ever before a forward and never enters the step's next collective."""

    name = "hang"

    def fire(self, context: FaultContext) -> None:
        """Sleep until a signal ends the process."""
        while True:
            context.sleep(3600.0)


class HangLock(_Hang):
    """The training thread and another one wait for each other's lock, for ever."""

    name = "hang_lock"

    def fire(self, context: FaultContext) -> None:
        """Take two locks in opposite orders in two threads, the classic deadlock."""
        metrics, model = threading.Lock(), threading.Lock()
        has_metrics = threading.Event()

        def report() -> None:
            with metrics:
                has_metrics.set()
                with model:
                    pass

        with model:
            threading.Thread(target=report, name="trainer-metrics", daemon=True).start()
            has_metrics.wait()
            with metrics:
                pass


class HangGil(_Hang):
    """The rank sleeps in C without giving the interpreter lock back: none of its threads runs."""

    name = "hang_gil"

    def fire(self, context: FaultContext) -> None:
        """Call libc's `sleep` as an extension calls C that forgot to release the lock."""
        libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock during a call
        while True:
            libc.sleep(3600)  # a signal ends one call early; its handler runs before the next


class HangStopped(_Hang):  # a debugger, or a batch system
    """The rank is stopped by SIGSTOP before a forward; SIGCONT lets it go on."""

    name = "hang_stopped"

    def fire(self, context: FaultContext) -> None:
        """Stop the whole process, with all its threads."""
        os.kill(os.getpid(), signal.SIGSTOP)


class SwallowedException(Fault):
    """An exception ends the rank's step early; the script logs it and continues, out of step."""

    name = "swallowed_exception"
    finding = "desync"
    place = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Raise in the last forward of this step, and catch it around forward and backward.

        What should have followed never happens, above all the collectives of the backward: from
        here on this rank's n-th collective is its peers' (n+1)-th.
        """
        strategy, model = context.parts().strategy, context.parts().strategy.model
        train_batch, forward = strategy.train_batch, model.forward
        forwards_left = strategy.microbatches

        def failing(*inputs: Any) -> Any:
            nonlocal forwards_left
            forwards_left -= 1
            if forwards_left == 0:
                raise FaultInjectedError(f"rank {context.rank} cannot compute this batch")
            return forward(*inputs)

        def forgiving(batch: Any) -> Tensor | None:
            try:
                return train_batch(batch)
            except FaultInjectedError as error:
                logger.warning("step %d failed, going on: %s", context.step, error)
                return None
            finally:
                model.forward = forward
                vars(strategy).pop("train_batch", None)

        model.forward = failing
        strategy.train_batch = forgiving  # type: ignore[method-assign]
