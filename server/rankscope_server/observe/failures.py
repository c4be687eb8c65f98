"""What one failure of one rank means: did it start the trouble, echo it, or tidy up after it?

Rules in order, first match wins; each has a source. Patterns are matched against the type and
the message of an exception, never against the user's own log lines.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rankscope.wire.schema import ErrorRaised, RankEnded
from rankscope_server.findings.text import cut
from rankscope_server.known_errors.entry import KnownError
from rankscope_server.observe.line_table import recognise_line

Role: TypeAlias = Literal["initiating", "cascade", "teardown"]

# places of an exception behind which a rank does not continue, unless it was caught
ENDS_TRAINING = ("main", "training", "fatal_signal")
_MOST_READ = 4_000  # characters of a message
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_STOP_TYPES = ("KeyboardInterrupt", "SignalException", "SystemExit")
# What a rank says when *another* one is gone or does not come.
_ECHO = re.compile(
    "|".join((
        r"connection (was )?(closed|reset|refused|aborted|lost)",  # gloo pair.cc, TCPStore, NCCL
        r"broken pipe|socket (timeout|closed|error)|software caused connection abort",
        r"gloo/transport|\[[^\]]*pair\.cc",  # every gloo transport error names its file
        r"timed? ?out waiting|wait timeout|operation timed out|timeout.{0,40}(barrier|store|c10d)",
        r"monitoredbarrier|failed to pass",  # torch monitored_barrier names the ranks it misses
        r"nccl.{0,40}(remote|system|unhandled|internal) ?(process|system)? ?error",
        r"watchdog (caught|got stuck|thread)|collective operation timeout",  # ProcessGroupNCCL
        r"(process group|communicator).{0,60}(aborted|destroyed|shut ?down)",
        r"rendezvous.{0,40}(closed|timeout|connection)",  # torch elastic
        r"\bc10d::|tcpstore|store->(get|wait)",
    )),
    re.IGNORECASE,
)  # fmt: skip
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError",
               "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
               "ChildFailedError", "RendezvousClosedError")  # fmt: skip
_WAITED = "collective_timeout_hang"  # family of what a rank says that waited for another in vain
# A misuse of torch.distributed is the rank's own fault although its type is one of c10d.
_OWN_FAULT = re.compile(
    r"invalid (usage|argument|rank)|mismatch|no space left|out of memory|cuda error", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's end or exception, with its meaning."""

    rank: int
    time_ns: int
    role: Role
    text: str  # "RuntimeError: ...", "killed by SIGKILL"
    step: int
    error: ErrorRaised | None = None
    ended: RankEnded | None = None
    is_weak: bool = False  # initiating only if nothing better is known
    entry: KnownError | None = None  # the known error that the exception, or the line, is
    line: str = ""  # of the rank's log, where it says what the end meant
    common_ns: int = 0  # `time_ns` on the clock of one host, as far as clocks are known

    @property
    def signature(self) -> str:
        """Return the text without numbers, so that ranks that fail alike compare equal."""
        return re.sub(r"\d+", "#", self.text)


def of_error(error: ErrorRaised) -> Failure:
    """Return what an exception means."""
    text = f"{error.type}: {cut(error.message)}" if error.message else error.type
    entry = _entry(error)
    who = (error.rank, error.time_ns)
    return Failure(*who, _role_of(error, entry), text, error.step, error=error, entry=entry)


def _entry(error: ErrorRaised) -> KnownError | None:
    """Return the known error that an exception is; it ended a process, so it is not harmless."""
    entry = recognise_line(f"{error.type}: {error.message[:_MOST_READ]}")
    return entry if entry is not None and entry.role != "benign" else None


def _role_of(error: ErrorRaised, entry: KnownError | None) -> Role:
    name = error.type.rpartition(".")[2]
    if name in _STOP_TYPES:
        return "teardown"
    if error.where == "fatal_signal":
        return "teardown" if "SIGTERM" in error.type + error.message else "initiating"
    if entry is not None and entry.role in ("initiating", "cascade"):
        is_timeout = entry.role == "cascade" and entry.family == _WAITED
        if entry.strength > 1 or is_timeout:
            return "initiating" if entry.role == "initiating" else "cascade"
    if _OWN_FAULT.search(error.message):
        return "initiating"
    if name in _ECHO_TYPES or _ECHO.search(error.message):
        return "cascade"
    return "initiating"


def of_end(ended: RankEnded, errors: Iterable[ErrorRaised]) -> Failure | None:
    """Return what the end of a process means beyond its exceptions; None for nothing."""
    who = (ended.rank, ended.time_ns)
    own = {error.where for error in errors if error.rank == ended.rank} - {"thread"}
    if ended.reason == "signal" and ended.signal is not None:
        role: Role = "teardown" if ended.signal in _STOP_SIGNALS else "initiating"
        if ended.signal == signal.SIGKILL and "main" in own:  # it had failed, but did not end
            role = "teardown"
        text = f"killed by {signal_name(ended.signal)}"
        if ended.detail:
            text += f" ({cut(ended.detail, 120)})"
        entry = recognise_line(ended.detail) if ended.detail else None
        entry = entry if entry is not None and entry.role == "initiating" else None
        return Failure(*who, role, text, ended.last_step, ended=ended, entry=entry)
    if own:
        return None  # the exception says more than the exit code that it led to
    if (ended.exit_code or 0) - 128 in _STOP_SIGNALS:  # it took the signal and left in order
        text = f"left on {signal_name((ended.exit_code or 0) - 128)}"
        return Failure(*who, "teardown", text, ended.last_step, ended=ended)
    if ended.reason == "exception":  # what it raised never came: it may be an echo like any
        text = "ended on an exception that was not recorded"
        return Failure(*who, "cascade", text, ended.last_step, ended=ended)
    if ended.reason == "exit_code" and ended.exit_code != 0:
        code = "" if ended.exit_code is None else f" with code {ended.exit_code}"
        text = f"exited{code} without an exception that was seen"
        return Failure(*who, "initiating", text, ended.last_step, ended=ended, is_weak=True)
    if ended.reason == "lost":
        text = "disappeared; how it ended is not known"
        return Failure(*who, "initiating", text, ended.last_step, ended=ended, is_weak=True)
    return None


def aborts_are_echoes(failures: Iterable[Failure], errors: Iterable[Failure]) -> list[Failure]:
    """Return `found` where an abort of a rank that has reported nothing but echoes is one too.

    The watchdog of NCCL ends its own process (SIGABRT) when a collective does not come back. The
    threads that are still at work then may touch what is gone (SIGSEGV).
    """
    roles: dict[int, set[Role]] = {}
    for error in errors:
        if not is_abort(error):
            roles.setdefault(error.rank, set()).add(error.role)
    return [
        replace(failure, role="cascade")
        if (is_abort(failure) or is_segfault(failure)) and roles.get(failure.rank) == {"cascade"}
        else failure
        for failure in failures
    ]


def is_abort(failure: Failure) -> bool:
    """Return whether this is a process that aborted itself."""
    if failure.ended is not None:
        return failure.ended.signal == signal.SIGABRT
    error = failure.error
    return error is not None and error.where == "fatal_signal" and "abort" in error.type.lower()


def is_segfault(failure: Failure) -> bool:
    """Return whether this is a process that touched memory that is not its own."""
    if failure.ended is not None:
        return failure.ended.signal == signal.SIGSEGV
    error = failure.error
    return error is not None and error.where == "fatal_signal" and "egmentation" in error.type


def is_unlike(failure: Failure) -> bool:
    """Return whether a library ended a rank because the calls of the ranks differ.

    It is whichever rank compares them first; which call is the wrong one it cannot know.
    """
    return failure.entry is not None and failure.entry.family == "desync_mismatch"


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; the number where it has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
