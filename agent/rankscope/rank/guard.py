"""The guard: a bug of ours may cost data, never a step.

Every entry point that the training process can reach from its own code wears `@guarded`; no
other file catches `Exception`. Never guard a function that itself calls the user's code: the
guard would swallow the user's exception.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter

TYPE_CHECKING = False  # see rankscope/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")
    A = TypeVar("A")
    B = TypeVar("B")

MAX_FAILURES = 3  # of one function; after that it is switched off
failures: Counter[str] = Counter()  # by function name
_last_logged: dict[str, float] = {}
_LOG_EVERY_SECONDS = 60.0
_HAS_VARARGS = 0x04  # inspect.CO_VARARGS; inspect takes 10 ms


def on_failure(name: str) -> None:
    """Count a failure of ours and say so on stderr, once a minute at most per function."""
    failures[name] += 1
    now = time.monotonic()
    if now - _last_logged.get(name, -_LOG_EVERY_SECONDS) < _LOG_EVERY_SECONDS:
        return
    _last_logged[name] = now
    error = sys.exc_info()[1]
    words = attempt(lambda: f": {error}") or ""  # the error may be one of the script's classes
    say(
        f"{name} failed ({type(error).__name__}{words}); training continues, "
        f"this data is lost (failure {failures[name]} of it)"
    )


def say(text: str) -> None:
    """Write a line to stderr, if that can be written: it may be None, closed, or on a full disk."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"rankscope: {text}\n")
    except Exception as error:  # the guard, once more: there is no place to say so
        if _is_of_a_signal(error):
            raise


def _is_of_a_signal(error: Exception) -> bool:
    """Return whether a signal handler of the script raised this while our code ran.

    A time limit by SIGALRM does so, and torchrun's way of stopping a notebook's ranks. A handler
    is known by its code, or, where it took itself out before it raised, by its arguments: one is
    the frame that was interrupted, which comes before its own in the traceback.
    """
    signal = sys.modules.get("signal")  # who sets a handler has imported it, until Python ends
    if signal is None:
        return False
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace, interrupted = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in codes or (interrupted is not None and _was_given(frame, interrupted)):
            return True
        trace, interrupted = trace.tb_next, frame
    return False


def _was_given(frame: FrameType, other: FrameType) -> bool:
    """Return whether one of the arguments of a frame is another frame, also among `*arguments`."""
    code, values = frame.f_code, frame.f_locals
    num_named = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[: num_named + bool(code.co_flags & _HAS_VARARGS)]:
        value = values.get(name)
        if value is other or (type(value) is tuple and any(item is other for item in value)):
            return True
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, a partial call or an object that can be called."""
    if isinstance(handler, functools.partial):
        return _code_of(handler.func)
    if not callable(handler):  # none, or one of C
        return None
    own = getattr(handler, "__code__", None)
    return own or getattr(type(handler).__call__, "__code__", None)


def to_the_end(*parts: Callable[[], object]) -> None:
    """Call all parts, one that is broken off once more, and only then pass on what broke it off.

    A signal handler of the script may raise in any of them. At the end of a process what is left
    undone may hang it: see `rankscope.rank.hooks.collectives.last_calls`.
    """
    broken_off: BaseException | None = None
    for part in parts:
        for _ in range(2):
            try:
                part()
                break
            except BaseException as error:  # noqa: BLE001 - raised again below
                broken_off = error
    if broken_off is not None:
        raise broken_off


def guarded(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run `function`; on any `Exception` count it, log it at most once a minute, return None.

    After MAX_FAILURES the function is not called again. `KeyboardInterrupt`, `SystemExit` and
    what a signal handler of the script raises pass through: stopping is the user's right.
    """
    name = getattr(function, "__qualname__", type(function).__name__)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if failures and failures[name] >= MAX_FAILURES:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # this is the one allowed broad catch
            if _is_of_a_signal(error):
                raise
            on_failure(name)
            return None

    return wrapper


def guarded_one(function: Callable[[A], R]) -> Callable[[A], R | None]:
    """As `guarded`, for one argument: calls that are made for each collective cost less so."""
    name = getattr(function, "__qualname__", type(function).__name__)

    def wrapper(first: A) -> R | None:
        if failures and failures[name] >= MAX_FAILURES:
            return None
        try:
            return function(first)
        except Exception as error:  # the guard, once more
            if _is_of_a_signal(error):
                raise
            on_failure(name)
            return None

    return wrapper


def guarded_two(function: Callable[[A, B], R]) -> Callable[[A, B], R | None]:
    """As `guarded_one`, for two arguments."""
    name = getattr(function, "__qualname__", type(function).__name__)

    def wrapper(first: A, second: B) -> R | None:
        if failures and failures[name] >= MAX_FAILURES:
            return None
        try:
            return function(first, second)
        except Exception as error:  # the guard, once more
            if _is_of_a_signal(error):
                raise
            on_failure(name)
            return None

    return wrapper


def attempt(function: Callable[[], R]) -> R | None:
    """Return what a piece of the user's code says, for example a `__str__`, or None if it raises.

    For what Python or the script calls once more by itself: the user's exception is not lost.
    """
    try:
        return function()
    except Exception:  # noqa: BLE001 - the other half of the guard: the failure is not ours
        return None
